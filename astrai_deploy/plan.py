"""Deployment + Machine -> Plan: every `auto` decided with its reason, from headers alone; or what to change to fit."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from astrai_deploy._fit import BLAMED, Change, Misfit, diagnose
from astrai_deploy._headers import Headers, no_headers, open_model, read_headers
from astrai_deploy._memory import Memory, held_bytes
from astrai_deploy._precision import Decision, Native
from astrai_deploy._problem import ConfigError, Origin, dotted
from astrai_deploy._size import Size, size_deployment
from astrai_deploy.paths import cache_dir, shipped
from astrai_runtime import part
from astrai_runtime.attention._select import Choice
from astrai_runtime.attention.base import Phase
from astrai_runtime.kernels._build import find
from astrai_runtime.kernels.base import FORMATS
from astrai_runtime.kv.base import KVShape
from astrai_runtime.machine import Machine, memory_limit
from astrai_runtime.model._matrices import stored_types
from astrai_runtime.model.base import DecoderSpec, TensorSource
from astrai_runtime.sources.base import Located
from astrai_runtime.weights.base import Checkpoint

if TYPE_CHECKING:
    from astrai_deploy.compose import Composed
    from astrai_deploy.origins import Origins, Setting
    from astrai_deploy.schema import Deployment


@dataclass(frozen=True)
class Plan:
    """What will run, in numbers and names; nothing after this asks what the machine can do.

    A plan for a described machine, or with a `problem`, is for reading: only one that fits a probed machine can be built.
    """

    deployment: Deployment
    machine: Machine
    headers: Headers
    weights: str  # of the matrices in memory: a format of the native kernels, or torch's name
    dtype: str  # of activations, torch's name
    native: Native | None  # None: torch computes
    kv_shape: KVShape
    memory: Memory
    choices: Mapping[Phase, Choice]  # attention
    decisions: tuple[Decision, ...]
    problem: Misfit | None

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def spec(self) -> DecoderSpec:
        return self.headers.spec

    @property
    def table(self) -> Mapping[str, TensorSource]:
        """Canonical tensor names and where each comes from."""
        return self.headers.table

    @property
    def located(self) -> Located:
        return self.headers.located

    @property
    def relays(self) -> bool:
        """True when another service computes: nothing of the model is in this process."""
        return bool(part.load("provider", self.deployment.provider.kind).answers == "text")

    @property
    def context(self) -> int:
        """Tokens that one sequence may hold, prompt and answer together."""
        return self.kv_shape.context

    @property
    def known_context(self) -> int:
        """`context`, or 0 where only another service knows it."""
        return 0 if self.relays and self.deployment.model.context == "auto" else self.context

    @property
    def kv_tokens(self) -> int:
        return self.kv_shape.n_tokens

    @property
    def full_contexts(self) -> int:
        """Sequences of the whole context that can run at once."""
        return min(self.kv_tokens // self.context, self.kv_shape.max_batch_size)

    @property
    def attention(self) -> Mapping[Phase, str]:
        """The backend that serves each phase."""
        return {phase: choice.name for phase, choice in self.choices.items()}

    @property
    def weight_bytes(self) -> Mapping[str, int]:
        """What the weights would take in each format that whoever computes here can hold; empty where there are none."""
        if not self.headers.tensors:
            return {}
        if self.native is None:
            return {name: held_bytes(self.spec, name, None) for name in dict.fromkeys(("float32", "bfloat16", self.weights))}
        stored = stored_types(self.table, self.headers.tensors)
        return {name: held_bytes(self.spec, name, stored) for name in FORMATS}

    def open(self, located: Located | None = None) -> Checkpoint:
        """The model's files, by default where the plan found them. The caller closes them.

        Raises:
            WeightsError: damaged, incomplete or unsupported files.
        """
        return open_model(self.deployment.model, located or self.located)


def make_plan(composed: Composed) -> Plan:
    """Plans on the declared machine; `machine: probe` looks at this one. Reads headers, fetches and writes nothing.

    Raises:
        ConfigError: a declared value that this model or machine cannot honour; the message says where it was declared.
        UnknownPart, BackendRefused: no attention backend can serve, or the required one cannot.
        SourceError, WeightsError: the model's files are missing, damaged or unsupported.
    """
    deployment = composed.deployment
    run = deployment.run
    provider = deployment.provider.kind
    if part.load("provider", provider).needs_weights:
        headers = read_headers(deployment.model, cache=cache_dir(run.cache), offline=run.offline)
    else:
        headers = no_headers(deployment.model, provider)
    places = {key: place(origin) for key in BLAMED if (origin := composed.origin(key))}
    machine, chosen = with_kernels(deployment.machine.machine(), deployment), notable(composed.origins)
    try:
        return plan_deployment(deployment, machine, headers, chosen=chosen, places=places)
    except ConfigError as error:
        raise ConfigError(replace(found, origin=composed.origins.find(found.key)) for found in error.problems) from None


def with_kernels(machine: Machine, deployment: Deployment) -> Machine:
    """This machine, told whether its CPU kernels are compiled already, or can be. A described one says so itself."""
    if not machine.probed or machine.device != "cpu":
        return machine
    build = find(shipped("csrc") / "cpu", cache_dir(deployment.run.cache))
    there = {"cpu_kernels": build.library is not None, "cxx": build.compiler is not None}
    others = machine.software - there.keys()
    return replace(machine, software=others | {name for name, found in there.items() if found})


def notable(origins: Origins) -> dict[str, Setting]:
    """Keys that a recipe, a user's file, the environment or the command line set; the shipped options set the others."""
    last = {key: settings[-1] for key, settings in origins.settings.items() if settings}
    said = {key: setting for key, setting in last.items() if setting.value and not setting.origin.source.startswith("conf/")}
    return {dotted(key): setting for key, setting in said.items() if not isinstance(key[-1], int)}


def place(origin: Origin) -> str:
    """Where a value comes from, without repeating what was typed."""
    return "command line" if origin.source.startswith("command line: ") else str(origin)


def plan_deployment(
    deployment: Deployment,
    machine: Machine,
    headers: Headers,
    *,
    chosen: Container[str] = (),
    places: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Decides everything. Pure but for a look at this process's memory limit when the machine was probed.

    What does not fit is blamed on `chosen` keys, which a person set, first; `places` tells where keys are declared.

    Raises:
        ConfigError, UnknownPart, BackendRefused: as `make_plan`.
    """
    size = size_deployment(deployment, machine, headers)
    precision = size.precision
    return Plan(
        deployment=deployment,
        machine=machine,
        headers=headers,
        weights=precision.weights.value,
        dtype=precision.dtype.value,
        native=precision.native,
        kv_shape=size.kv_shape,
        memory=size.memory,
        choices=precision.choices,
        decisions=(_machine(deployment, machine), *_model_decisions(deployment, size)),
        problem=None if size.fits else diagnose(deployment, machine, headers, size, chosen=chosen, places=places),
    )


def _machine(deployment: Deployment, machine: Machine) -> Decision:
    if not machine.probed:
        reason = "a description: planned here, served elsewhere"
    elif getattr(deployment.machine, "memory", "auto") != "auto":
        reason = "with the memory that machine.memory allows"
    elif machine.device == "cuda":
        reason = "the GPU's own memory"
    else:
        reason = f"memory: {memory_limit().origin}"
    return Decision("machine", machine.name, reason)


def _model_decisions(deployment: Deployment, size: Size) -> tuple[Decision, ...]:
    """Those about the model and its KV, as far as both are in this process."""
    if part.load("provider", deployment.provider.kind).answers == "text":
        context = next(each for each in size.decisions if each.key == "model.context")
        told = Decision(context.key, "unknown", "what the other service says, once it is asked")
        return (told,) if deployment.model.context == "auto" else (replace(context, reason="declared"),)
    return (*size.decisions, *_prefix_cache(deployment))


def _prefix_cache(deployment: Deployment) -> tuple[Decision, ...]:
    """What the KV mode makes of `prefix_cache`, where it has one."""
    sharing = getattr(part.load("kv", deployment.kv.kind), "sharing", None)
    if sharing is None:
        return ()
    on, reason = sharing(deployment.kv)
    return (Decision("kv.prefix_cache", "on" if on else "off", reason),)


__all__ = ["Change", "Decision", "Headers", "Memory", "Misfit", "Plan", "make_plan", "notable", "plan_deployment"]
