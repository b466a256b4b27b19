"""Deployment: the shape of a whole deployment. What each part obeys is declared beside the part."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import ByteSize, Field, PositiveInt

from astrai_deploy.parts import ByKind
from astrai_runtime.attention._config import AttentionConfig
from astrai_runtime.kernels.base import KernelsConfig
from astrai_runtime.kv.base import KVConfig
from astrai_runtime.machine import Device, Machine, memory_limit, probe
from astrai_runtime.model._config import ModelConfig
from astrai_runtime.part import Config, PartConfig
from astrai_runtime.sampling._config import SamplingConfig
from astrai_runtime.scheduler.base import SchedulerConfig
from astrai_runtime.server.config import ServerConfig

Bytes = Annotated[ByteSize, Field(gt=0)]  # a number of bytes, or "16 GiB"


class MachineConfig(PartConfig):
    """Where the deployment will run: this machine, or a description of another one."""

    @abstractmethod
    def machine(self) -> Machine:
        """The machine as the planner sees it."""


class ProbedMachine(MachineConfig):
    """This very machine; the only kind that can serve."""

    kind: Literal["probe"]
    device: Literal["auto", "cpu"]  # cpu: leave a GPU alone
    memory: Bytes | Literal["auto"]  # budget of the model's device; auto: all that the container or the GPU offers

    def machine(self) -> Machine:
        """Probes: reads /proc and /sys, runs nvidia-smi where there is one."""
        found = probe()
        if self.device == "cpu" and found.device != "cpu":
            found = replace(found, device="cpu", memory_bytes=memory_limit().amount, compute_capability=None)
        return found if self.memory == "auto" else replace(found, memory_bytes=int(self.memory))


class DescribedMachine(MachineConfig):
    """A machine that need not be here: it can be planned for, not served on."""

    kind: Literal["described"]
    name: str = Field(min_length=1)
    device: Device
    memory: Bytes  # of the model's device: main memory on cpu, one GPU's on cuda
    cores: PositiveInt
    features: frozenset[str]  # CPU instruction sets in the kernel's spelling
    compute_capability: tuple[int, int] | None
    software: frozenset[str]  # flash_attn, nvcc, cxx (a C++ compiler), cpu_kernels (compiled already)

    def machine(self) -> Machine:
        return Machine(
            name=self.name,
            device=self.device,
            memory_bytes=int(self.memory),
            cores=self.cores,
            features=self.features,
            compute_capability=self.compute_capability,
            software=self.software,
        )


class RunConfig(Config):
    """What one run leaves behind, and what it may reach. `auto` folders follow the XDG base directories."""

    dir: str = Field(min_length=1)  # records of runs
    cache: str = Field(min_length=1)  # downloaded and assembled model files
    offline: bool  # true: nothing is ever downloaded
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]
    log_format: Literal["console", "json"]


class Model(ModelConfig):
    """A model card whose source is one of the files of `sources/`."""

    source: Annotated[PartConfig, ByKind("sources")]


MACHINES = {"probe": ProbedMachine, "described": DescribedMachine}


class Deployment(Config):
    """Everything that one service is made of. Frozen; a key that nobody obeys is an error at every depth."""

    promise: str  # what the recipe is for, in one sentence
    machine: Annotated[MachineConfig, ByKind("machine", MACHINES)]
    model: Model
    kv: Annotated[KVConfig, ByKind("kv")]
    attention: AttentionConfig
    kernels: KernelsConfig
    sampling: SamplingConfig
    scheduler: Annotated[SchedulerConfig, ByKind("scheduler")]
    provider: Annotated[PartConfig, ByKind("provider")]
    # The list groups, by instance name; an empty one leaves no key in YAML.
    agents: dict[str, Annotated[PartConfig, ByKind("agents")]] = Field(default_factory=dict)
    protocols: dict[str, Annotated[PartConfig, ByKind("protocols")]] = Field(default_factory=dict)
    server: ServerConfig
    run: RunConfig


LIST_GROUPS = ("agents", "protocols")  # keyed by instance name; the others hold one choice
