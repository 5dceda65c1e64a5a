"""The systems under test, in the order of the tables: KeepStep first, for the ratios are to it."""

from systems.keepstep import KeepStep
from systems.ray_train import RayTrain
from systems.system import System
from systems.torchrun import Torchrun

EVERY_STEP = {"every_steps": 500, "snapshot_every_steps": 1}

SYSTEMS: dict[str, System] = {
    "api": KeepStep("KeepStep, with the API", "four_lines.py", EVERY_STEP),
    "plain": KeepStep("KeepStep, torchrun's script", "plain.py", EVERY_STEP),
    "torchrun": Torchrun(),
    "ray": RayTrain(every=20),
    "ray-every-step": RayTrain(every=1),
}
