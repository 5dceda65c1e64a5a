"""The systems under test, in the order of the tables: KeepStep first, for the ratios are to it."""

from systems.keepstep import KeepStep
from systems.ray_train import RayTrain
from systems.system import System
from systems.torchrun import Torchrun

SYSTEMS: dict[str, System] = {
    "api": KeepStep(api=True),
    "plain": KeepStep(api=False),
    "torchrun": Torchrun(),
    "ray": RayTrain(every=20),
    "ray-every-step": RayTrain(every=1),
}
