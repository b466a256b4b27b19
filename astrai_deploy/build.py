"""Plan -> engine, leaves first: files, weights, model, KV storage, attention, sampling, scheduler, engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rich.console import Console

from astrai_deploy._laps import Laps
from astrai_deploy._native import Kernels, native_decoder, open_kernels, packed_model
from astrai_deploy.paths import cache_dir
from astrai_deploy.plan import Plan, make_plan
from astrai_deploy.progress import shown
from astrai_runtime import part
from astrai_runtime.errors import BackendRefused, CapacityExceeded, SourceError
from astrai_runtime.request import SamplingParams
from astrai_runtime.sources.base import Located, Progress, silent

if TYPE_CHECKING:
    from astrai_deploy.compose import Composed
    from astrai_deploy.schema import Deployment
    from astrai_runtime.agents.base import Agent
    from astrai_runtime.attention.base import AttentionBackend, Phase
    from astrai_runtime.generate import TextInterface
    from astrai_runtime.kv.base import KVMode
    from astrai_runtime.provider.base import Decoder, ModelInfo, Provider, TextProvider
    from astrai_runtime.sampling._pipeline import Sampler
    from astrai_runtime.text.chat_template import ChatTemplate
    from astrai_runtime.text.tokenizer import Tokenizer
    from astrai_runtime.weights.base import Checkpoint


@dataclass(frozen=True)
class Built:
    """What a service runs: the engine, and the agent that turns requests into prompts. The engine is not started yet."""

    engine: TextInterface
    agent: Agent
    load_s: float


def fetch_files(deployment: Deployment, progress: Progress = silent) -> Located:
    """Downloads or assembles the model's files where they are missing.

    Raises:
        SourceError: they cannot be had; the message says why and what would help.
    """
    source = part.load("sources", deployment.model.source.kind)(deployment.model.source)
    located: Located = source.locate(
        cache=cache_dir(deployment.run.cache), offline=deployment.run.offline, fetch=True, progress=progress
    )
    return located


def sampling_defaults(deployment: Deployment) -> SamplingParams:
    """What a request that says nothing about sampling gets."""
    declared = deployment.sampling.model_dump(exclude={"pipeline", "logprobs_mode"})
    return SamplingParams(**declared)


def build_sampler(deployment: Deployment, n_tokens: int, kernels: Kernels | None = None) -> Sampler:
    """The declared stages in the declared order; ids from `n_tokens` on have no token and are never sampled.

    `kernels`, where there are some, do the work of the stages that they know.
    """
    from astrai_runtime.sampling._pipeline import Sampler

    sampling = deployment.sampling
    stages = [part.load("sampling", name)() for name in sampling.pipeline]
    return Sampler(stages, n_tokens, sampling.logprobs_mode, None if kernels is None else kernels.sampler())


def build_text(
    plan: Plan, located: Located, checkpoint: Checkpoint, progress: Progress = silent, kernels: Kernels | None = None
) -> tuple[Tokenizer, ChatTemplate | None]:
    """Tokenizer and chat template: the model's own, unless the model card declares a template. `checkpoint` stays open.

    The library of `kernels`, where there are some, does the work of the tokenizers that it knows.
    """
    from astrai_runtime.text.chat_template import ChatTemplate, template_of_folder, template_of_gguf

    declared = plan.deployment.model.chat.template
    if located.path is None:
        from astrai_runtime.text import _bytes

        tokenizer, own = _bytes.byte_tokenizer(), None
    elif located.path.is_dir():
        from astrai_runtime.text import _hf

        tokenizer = _hf.from_folder(located.path)
        own = template_of_folder(located.path, tokenizer) if declared == "auto" else None
    else:
        from astrai_runtime.text import _gguf
        from astrai_runtime.text._merges import MergeCache

        tokenizer = _gguf.from_gguf(
            checkpoint.metadata,
            cache=MergeCache(cache_dir(plan.deployment.run.cache) / "tokenizers"),
            progress=lambda done, total: progress("preparing the tokenizer", done, total, "pieces"),
            library=None if kernels is None else kernels.library.functions,
        )
        own = template_of_gguf(checkpoint.metadata, tokenizer) if declared == "auto" else None
    return tokenizer, own if declared == "auto" else ChatTemplate(declared, tokenizer)


class PlannedMaterials:
    """What a plan has for its provider, made on demand (see `provider.base.Materials`)."""

    def __init__(self, plan: Plan, progress: Progress, laps: Laps | None = None) -> None:
        self._plan, self._progress, self._laps = plan, progress, laps or Laps()

    @cached_property
    def info(self) -> ModelInfo:
        from astrai_runtime.provider.base import ModelInfo

        spec, headers = self._plan.spec, self._plan.headers
        return ModelInfo(
            name=self._plan.deployment.model.name,
            architecture=spec.architecture,
            n_parameters=headers.n_parameters,
            vocab_size=spec.vocab_size,
            context=self._plan.known_context,
            created=int(time.time()),
        )

    @property
    def template(self) -> str:
        return self._plan.deployment.model.chat.template

    @property
    def sampling(self) -> tuple[str, ...]:
        stages = [part.load("sampling", name) for name in self._plan.deployment.sampling.pipeline]
        return tuple(name for stage in stages for name in (*(knob.name for knob in stage.knobs), *stage.fields))

    @property
    def device(self) -> str:
        return self._plan.machine.device

    @property
    def phases(self) -> Mapping[Phase, str]:
        return self._plan.attention

    @cached_property
    def located(self) -> Located:
        """The model's files, fetched where they are missing."""
        return fetch_files(self._plan.deployment, self._progress)

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        """Opened once for the tokenizer and for the weights, which close it."""
        return self._plan.open(self.located)

    def text(self) -> tuple[Tokenizer, ChatTemplate | None]:
        kernels = self.kernels
        self._laps.lap("kernels")
        built = build_text(self._plan, self.located, self._checkpoint, self._progress, kernels)
        self._laps.lap("tokenizer")
        return built

    @cached_property
    def kernels(self) -> Kernels | None:
        """The native kernels, compiled where they are missing; None where the plan does without."""
        native = self._plan.native
        return None if native is None else open_kernels(self._plan, native, self._progress)

    def decoder(self) -> Decoder:
        kernels = self.kernels
        with closing(self._checkpoint) as checkpoint:
            if kernels is None:
                return self._torch_decoder(checkpoint)
            # Importing torch takes as long as reading packed weights, and neither needs the other.
            with ThreadPoolExecutor(1, "weights") as reader:
                packed = reader.submit(packed_model, self._plan, kernels, checkpoint, self._progress)
                import torch  # noqa: F401

                self._laps.lap("torch")
                return native_decoder(self._plan, kernels, packed.result())

    def _torch_decoder(self, checkpoint: Checkpoint) -> Decoder:
        import torch

        from astrai_runtime.model._load import check_tensors, load_weights
        from astrai_runtime.model._torch import TorchDecoder

        self._laps.lap("torch")
        plan, progress, dtype = self._plan, self._progress, getattr(torch, self._plan.dtype)
        check_tensors(checkpoint, plan.spec, plan.table)
        weights = load_weights(
            checkpoint,
            plan.spec,
            plan.table,
            dtype,
            lambda tensor, done, total: progress("loading weights", done, total),
        )
        return TorchDecoder(plan.spec, weights, dtype, device=plan.machine.device)

    def kv(self) -> KVMode:
        config = self._plan.deployment.kv
        mode: KVMode = part.load("kv", config.kind)(config, self._plan.kv_shape)
        return mode

    def backends(self) -> Mapping[str, AttentionBackend]:
        return {name: part.load("attention", name)() for name in dict.fromkeys(self.phases.values())}


def build(plan: Plan, progress: Progress = silent, laps: Laps | None = None) -> Built:
    """Opens the provider and assembles an engine that is ready to start. What took how long goes to `laps`.

    Raises:
        BackendRefused: the plan is for another machine than this one.
        SourceError, WeightsError: the model's files are missing or damaged; nothing was started.
        KernelError: the native kernels cannot be compiled or loaded.
        AstraiError: whatever else keeps the provider from opening.
    """
    if not plan.machine.probed:
        raise BackendRefused(
            f"machine '{plan.machine.name}' is a description to plan with; serving runs on this machine: use machine=auto"
        )
    from astrai_runtime.provider.base import TextProvider

    began, laps = time.monotonic(), laps or Laps()
    declared = plan.deployment.provider
    materials = PlannedMaterials(plan, progress, laps)
    provider = part.load("provider", declared.kind).open(declared, materials)
    laps.lap("weights")
    relays = isinstance(provider, TextProvider)
    engine, agent = relay(plan, provider) if relays else compute(plan, provider, materials.kernels)
    return Built(engine, agent, time.monotonic() - began)


def compute(plan: Plan, provider: Provider, kernels: Kernels | None) -> tuple[TextInterface, Agent]:
    """The engine over a provider that computes logits, and the agent that renders and tokenizes."""
    from astrai_runtime.agents._stateless import ChatStyle, StatelessAgent
    from astrai_runtime.engine import Engine

    deployment = plan.deployment
    engine = Engine(
        provider,
        part.load("scheduler", deployment.scheduler.kind)(deployment.scheduler, provider.kv),
        build_sampler(deployment, provider.tokenizer.vocab_size, kernels),
        defaults=sampling_defaults(deployment),
        stream_bytes=deployment.server.stream_bytes,
        undrained_ttl_s=deployment.scheduler.undrained_ttl_s,
    )
    chat = deployment.model.chat
    style = ChatStyle(chat.stop, chat.trim_leading_space)
    return engine, StatelessAgent(provider.tokenizer, provider.chat_template, style, provider.info.context)


def relay(plan: Plan, provider: TextProvider) -> tuple[TextInterface, Agent]:
    """The engine that passes on another service's answers, and the agent that lets it render and tokenize."""
    from astrai_runtime.agents._relay import RelayAgent
    from astrai_runtime.relay import RelayEngine

    deployment = plan.deployment
    engine = RelayEngine(
        provider,
        max_running=deployment.scheduler.max_batch_size,
        max_waiting=deployment.scheduler.max_waiting,
        defaults=sampling_defaults(deployment),
        knobs=PlannedMaterials(plan, silent).sampling,
        stream_bytes=deployment.server.stream_bytes,
        undrained_ttl_s=deployment.scheduler.undrained_ttl_s,
    )
    return engine, RelayAgent(provider)


def plan_with_files(composed: Composed, console: Console) -> Plan:
    """The plan. Where the model's files are not on this disk they are fetched first, unless `run.offline` forbids it.

    Raises:
        SourceError: they cannot be had. Otherwise as `make_plan`.
    """
    try:
        return make_plan(composed)
    except SourceError:
        if composed.deployment.run.offline:
            raise
    with shown(console) as progress:
        fetch_files(composed.deployment, progress)
    return make_plan(composed)


@contextmanager
def open_engine(*overrides: str, config_dirs: Sequence[str] = ()) -> Iterator[TextInterface]:
    """A running engine for Python callers: `with open_engine("+recipe=tiny") as engine: engine.generate("Hello")`.

    Raises:
        ConfigError: the configuration is not valid. CapacityExceeded: it does not fit this machine.
        SourceError, WeightsError, BackendRefused: as `build`.
    """
    from astrai_deploy.compose import compose

    plan = plan_with_files(compose(overrides, config_dirs), Console(stderr=True))
    if plan.problem is not None:
        raise CapacityExceeded(str(plan.problem))
    engine = build(plan).engine
    engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()


def fetch(composed: Composed) -> int:
    """The verb `fetch`: gets the model's files and says where they are. Returns the exit code."""
    console = Console(stderr=True)
    provider = composed.deployment.provider.kind
    if not part.load("provider", provider).needs_weights:
        console.print(f"the provider '{provider}' needs no files, nothing to fetch", highlight=False, soft_wrap=True)
        return 0
    with shown(console) as progress:
        located = fetch_files(composed.deployment, progress)
    console.print(f"{located.origin}: {located.path or 'made in memory, nothing to fetch'}", highlight=False, soft_wrap=True)
    return 0
