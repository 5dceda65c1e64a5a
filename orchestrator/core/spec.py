"""The job spec: what a user may ask for, with every limit in its field. PURE.

Invariants: types are strict ("2", true and 1.5 are no whole numbers); text is kept exactly as given; a spec that was accepted can be
run by this version; a spec dumped with ``model_dump(mode="json")`` validates to an equal one. Errors are told by ``spec_errors``.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

JOB_ID = re.compile(r"job-[a-z2-7]{12}")
MAX_WORLD_SIZE = 4096
MAX_TEXT_BYTES = 128 * 1024  # of a command or of an environment: what Linux takes for one argument

Framework = Literal["pytorch", "tensorflow", "jax", "plain"]
Strategy = Literal["ddp", "mirrored", "multi_worker_mirrored", "parameter_server", "data_parallel"]

STRATEGIES: dict[str, tuple[str | None, ...]] = {  # by framework, the default first
    "pytorch": ("ddp",),
    "tensorflow": ("mirrored", "multi_worker_mirrored", "parameter_server"),
    "jax": ("data_parallel",),
    "plain": (None,),
}
NOT_YET: frozenset[str] = frozenset({"data_parallel", "multi_worker_mirrored", "parameter_server"})
RUNNABLE = "this version runs pytorch with ddp, tensorflow with mirrored, and plain without a strategy"

RESERVED_ENV = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "TF_CONFIG", "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES",
})  # fmt: skip
RESERVED_ENV_PREFIXES = ("KEEPSTEP_", "MASTER_", "TORCHELASTIC_", "RAY_")

LabelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$", max_length=63)]
LabelValue = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]*$", max_length=200)]
AnyNumber = Annotated[float, Field(allow_inf_nan=False)]


def refuse(message: str, field: str | None = None) -> PydanticCustomError:
    """An error of our own rules; ``field`` names another field (dotted) than the one being validated."""
    return PydanticCustomError("keepstep", "{text}", {"text": message, "field": field})


def _not_reserved(name: str) -> str:
    if name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES):
        raise refuse("is set by KeepStep for each rank; remove it")
    return name


EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256), AfterValidator(_not_reserved)]


class Section(BaseModel):
    """Strict, frozen, and without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Resources(Section):
    """What an attempt occupies while it runs; all of it or nothing."""

    nodes: int = Field(default=1, ge=1, le=1000, description="Number of different nodes, 1 to 1000.")
    min_nodes: int | None = Field(default=None, ge=1, le=1000, description="Fewest nodes to go on with, 1 to `nodes`; null: `nodes`.")
    spare_nodes: int = Field(default=0, ge=0, le=100, description="Nodes kept warm as a replacement, 0 to 100.")
    processes_per_node: int = Field(
        default=1, ge=1, le=64, description=f"Ranks on each node, 1 to 64; nodes x processes_per_node is at most {MAX_WORLD_SIZE}."
    )
    gpus_per_node: int = Field(default=0, ge=0, le=64, description="GPUs on each node, 0 to 64.")
    cpus_per_node: float = Field(default=1, gt=0, le=1024, description="CPU cores on each node, above 0, up to 1024.")
    memory_gb: float = Field(default=2, gt=0, le=65536, description="Host memory on each node in GiB (2^30 bytes), above 0, up to 65536.")
    devices_per_node: int | None = Field(
        default=None, ge=1, le=64, description="Replicas of `mirrored` in its one process, 1 to 64; null: gpus_per_node, else 1."
    )

    @field_validator("min_nodes")
    @classmethod
    def _min_nodes_within_nodes(cls, value: int | None, info: ValidationInfo) -> int | None:
        nodes = info.data.get("nodes")
        if value is not None and nodes is not None and value > nodes:
            raise refuse(f"{value} is more than nodes = {nodes}; lower min_nodes or raise nodes")
        return value

    @field_validator("processes_per_node")
    @classmethod
    def _world_size_possible(cls, value: int, info: ValidationInfo) -> int:
        nodes = info.data.get("nodes")
        if nodes is not None and nodes * value > MAX_WORLD_SIZE:
            raise refuse(f"{nodes} nodes x {value} processes are {nodes * value} ranks; at most {MAX_WORLD_SIZE} are possible, lower one")
        return value

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node


class Checkpoint(Section):
    storage: str | None = Field(
        default=None, min_length=1, max_length=1000,
        description="Absolute path or URL (s3://, gs://) below which the job's folder is made, 1 to 1000 characters; null: the server's.",
    )  # fmt: skip
    every_steps: Annotated[int, Field(ge=1, le=10**9)] | Literal["auto"] | None = Field(
        default=100,
        description='Steps between two checkpoints, 1 to 10^9, or "auto": as `every_seconds: auto`; null: not by steps.',
    )
    every_seconds: Annotated[AnyNumber, Field(gt=0, le=604800)] | Literal["auto"] | None = Field(
        default=None,
        description='Seconds between two, above 0, up to 604800, or "auto": from the measured time of a write and the failures of the job '
        "(Young/Daly); null: not by time.",
    )
    keep_last: int = Field(default=3, ge=2, le=1000, description="Checkpoints to keep, 2 to 1000.")
    snapshot_every_steps: Annotated[int, Field(ge=1, le=10**9)] | Literal["auto"] = Field(
        default="auto", description='Steps between two snapshots in host memory, 1 to 10^9, or "auto".'
    )

    @field_validator("storage")
    @classmethod
    def _storage_is_absolute(cls, value: str | None) -> str | None:
        if value is not None and ("\0" in value or not re.match(r"/|(file|local):///|(?!file:|local:)[a-z][a-z0-9+.-]*://.", value)):
            raise refuse("must be an absolute path or a URL such as s3://bucket/folder; nodes have no common working directory")
        return value


class Restart(Section):
    """Budgets within a sliding window; counted over all attempts."""

    max_user_errors: int = Field(default=0, ge=0, le=1000, description="Restarts after errors of the program itself, 0 to 1000.")
    max_infrastructure: int = Field(default=20, ge=0, le=10000, description="Restarts after signals, lost nodes and the like, 0 to 10000.")
    stop_on_nan: bool = Field(
        default=False, description="True: a metric that is NaN or infinite in 3 reports in a row is an error of the program."
    )
    window_hours: float = Field(default=24, gt=0, le=8760, description="Length of the window in hours, above 0, up to 8760.")


class Timeouts(Section):
    start_s: float = Field(
        default=600, gt=0, le=86400,
        description="Seconds of silence allowed before the first step and in announced phases, and for nodes to get ready; above 0, up to"
        " 86400.",
    )  # fmt: skip
    hang_s: Annotated[AnyNumber, Field(gt=0, le=604800)] | Literal["auto"] = Field(
        default="auto", description='Seconds without a step that count as a hang, above 0, up to 604800, or "auto".'
    )
    silence_s: float | None = Field(
        default=None, gt=0, le=604800,
        description="For scripts that report no steps: seconds in which no rank prints or uses the CPU that count as a hang, above 0, up to"
        " 604800; null: such scripts are never taken to hang.",
    )  # fmt: skip
    grace_s: float = Field(default=30, ge=0, le=3600, description="Seconds between SIGTERM and SIGKILL, 0 to 3600.")
    run_hours: float | None = Field(default=None, gt=0, le=87600, description="Longest run in hours, above 0, up to 87600; null: no limit.")


class Success(Section):
    """What must be so, beside that all ranks end with 0."""

    steps: int | None = Field(default=None, ge=1, le=10**12, description="Step that every rank must have finished, 1 to 10^12; null: any.")
    files: tuple[Annotated[str, StringConstraints(pattern=r"^[^\x00]+$", max_length=1000)], ...] = Field(
        default=(), strict=False, max_length=100,
        description="At most 100 paths that must exist on some node at the end; relative ones count from the working directory.",
    )  # fmt: skip


class JobSpec(Section):
    """What a user submits. Unknown fields are refused."""

    name: str = Field(
        min_length=1, max_length=200,
        description="1 to 200 characters; no control character, no '/', no blank at either end, not shaped like a job id.",
    )  # fmt: skip
    framework: Framework = Field(description=f"pytorch, tensorflow, jax or plain; {RUNNABLE}.")
    strategy: Strategy | None = Field(
        default=None, validate_default=True, description=f"How ranks work together; null: the framework's own. {RUNNABLE.capitalize()}."
    )
    command: tuple[str, ...] = Field(
        strict=False, min_length=1, max_length=1000,
        description="Program and arguments: 1 to 1000 strings, the first not empty, no NUL, 128 KiB in all; passed on byte for byte.",
    )  # fmt: skip
    working_dir: None = Field(default=None, exclude=True, description="Only in files for the CLI, which uploads the folder as `bundle`.")
    bundle: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="SHA-256 of an uploaded zip, 64 lower-case hex digits; null: no code is unpacked.",
    )
    env: dict[EnvName, str] = Field(
        default_factory=dict, max_length=1000,
        description="Environment of each rank: at most 1000 names of letters, digits and _, string values without NUL, 128 KiB in all.",
    )  # fmt: skip
    resources: Resources = Field(default_factory=Resources, description="What an attempt occupies.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Snapshots and checkpoints.")
    restart: Restart = Field(default_factory=Restart, description="Restart budgets.")
    timeouts: Timeouts = Field(default_factory=Timeouts, description="Limits of time.")
    success: Success = Field(default_factory=Success, description="What a job must have reached to succeed.")
    priority: int = Field(default=50, ge=0, le=100, description="0 to 100; higher starts first.")
    labels: dict[LabelName, LabelValue] = Field(
        default_factory=dict, max_length=64,
        description="At most 64; names of 1 to 63 letters, digits and . _ / -, values up to 200 characters without control characters.",
    )  # fmt: skip

    @field_validator("name")
    @classmethod
    def _name_can_be_shown(cls, value: str) -> str:
        if value != value.strip():
            raise refuse("must not be blank or begin or end with a blank; remove it")
        if "/" in value or value in (".", ".."):
            raise refuse("must not contain '/' nor be '.' or '..'; it is part of addresses, use '-'")
        if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in value):
            raise refuse("must not contain control characters; remove them")
        if JOB_ID.fullmatch(value):
            raise refuse("must not look like a job id (job- and 12 letters); choose another name")
        return value

    @field_validator("strategy")
    @classmethod
    def _strategy_of_framework(cls, value: str | None, info: ValidationInfo) -> str | None:
        framework = info.data.get("framework")
        if framework is None:
            return value  # that field has its own error
        known = STRATEGIES[framework]
        if value is not None and value not in known:
            names = ", ".join(s for s in known if s) or "none (leave it out)"
            raise refuse(f"{value} does not belong to {framework}; use {names}")
        chosen = value or known[0]
        if chosen in NOT_YET:
            field, what = ("framework", framework) if value is None else ("strategy", value)
            raise refuse(f"{what} cannot be run yet; {RUNNABLE}", field)
        return chosen

    @field_validator("command")
    @classmethod
    def _command_can_be_run(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value[0]:
            raise refuse("the first string names the program and must not be empty")
        if any("\0" in argument for argument in value):
            raise refuse("must not contain NUL (\\u0000): no process can be given one")
        size = sum(len(argument.encode()) + 1 for argument in value)
        if size > MAX_TEXT_BYTES:
            raise refuse(f"has {size} bytes; at most {MAX_TEXT_BYTES} are possible, put long text into a file")
        return value

    @field_validator("working_dir", mode="before")
    @classmethod
    def _working_dir_is_for_the_client(cls, value: object) -> None:
        if value is not None:
            raise refuse("is a folder of the client: the CLI uploads it (keepstep submit -f) and puts its sha256 into bundle")

    @field_validator("env")
    @classmethod
    def _env_can_be_set(cls, value: dict[str, str]) -> dict[str, str]:
        if any("\0" in text for text in value.values()):
            raise refuse("values must not contain NUL (\\u0000)")
        size = sum(len(name) + len(text.encode()) + 2 for name, text in value.items())
        if size > MAX_TEXT_BYTES:
            raise refuse(f"has {size} bytes; at most {MAX_TEXT_BYTES} are possible, put long text into a file")
        return value

    @model_validator(mode="after")
    def _resources_fit_the_strategy(self) -> JobSpec:
        r = self.resources
        if self.strategy == "mirrored":
            if r.nodes != 1:
                raise refuse(f"mirrored works on one node, not {r.nodes}; set it to 1", "resources.nodes")
            if r.processes_per_node != 1:
                text = f"mirrored has one process for all devices, not {r.processes_per_node}; set it to 1 and use devices_per_node"
                raise refuse(text, "resources.processes_per_node")
            if r.devices_per_node and 0 < r.gpus_per_node < r.devices_per_node:
                raise refuse(f"{r.devices_per_node} is more than gpus_per_node = {r.gpus_per_node}", "resources.devices_per_node")
        elif r.devices_per_node is not None:
            raise refuse("has a meaning for strategy mirrored only; use processes_per_node", "resources.devices_per_node")
        return self


def dump(spec: JobSpec) -> dict[str, Any]:
    """A spec as plain JSON values; ``JobSpec.model_validate`` of it gives an equal spec."""
    return spec.model_dump(mode="json")
