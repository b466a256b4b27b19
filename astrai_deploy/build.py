"""Plan -> engine, leaves first: files, weights, model, KV storage, attention, sampling, scheduler, engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from astrai_deploy.paths import cache_dir
from astrai_deploy.plan import Plan, make_plan
from astrai_deploy.progress import shown
from astrai_runtime import part
from astrai_runtime.errors import BackendRefused, CapacityExceeded
from astrai_runtime.request import SamplingParams
from astrai_runtime.sources.base import Located, Progress, silent

if TYPE_CHECKING:
    from astrai_deploy.compose import Composed
    from astrai_deploy.schema import Deployment
    from astrai_runtime.agents.base import Agent
    from astrai_runtime.engine import Engine
    from astrai_runtime.sampling._pipeline import Sampler
    from astrai_runtime.text.chat_template import ChatTemplate
    from astrai_runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Built:
    """What a service runs: the engine, and the agent that turns requests into prompts. The engine is not started yet."""

    engine: Engine
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
    declared = deployment.sampling.model_dump(exclude={"pipeline"})
    return SamplingParams(**declared)


def build_sampler(deployment: Deployment, n_tokens: int) -> Sampler:
    """The declared stages in the declared order; ids from `n_tokens` on have no token and are never sampled."""
    from astrai_runtime.sampling._pipeline import Sampler

    return Sampler([part.load("sampling", name)() for name in deployment.sampling.pipeline], n_tokens)


def build_text(plan: Plan, located: Located) -> tuple[Tokenizer, ChatTemplate | None]:
    """Tokenizer and chat template: the model's own, unless the model card declares a template."""
    from astrai_runtime.text import _bytes, _gguf, _hf
    from astrai_runtime.text.chat_template import ChatTemplate, template_of_folder, template_of_gguf
    from astrai_runtime.weights._open import open_checkpoint

    declared = plan.deployment.model.chat.template
    if located.path is None:
        tokenizer, own = _bytes.byte_tokenizer(), None
    elif located.path.is_dir():
        tokenizer = _hf.from_folder(located.path)
        own = template_of_folder(located.path, tokenizer) if declared == "auto" else None
    else:
        checkpoint = open_checkpoint(located.path)
        tokenizer = _gguf.from_gguf(checkpoint.metadata)
        own = template_of_gguf(checkpoint.metadata, tokenizer) if declared == "auto" else None
        checkpoint.close()
    return tokenizer, own if declared == "auto" else ChatTemplate(declared, tokenizer)


def build(plan: Plan, progress: Progress = silent) -> Built:
    """Loads the model and assembles an engine that is ready to start.

    Raises:
        BackendRefused: the plan is for another machine than this one.
        SourceError, WeightsError: the model's files are missing or damaged; nothing was started.
    """
    if not plan.machine.probed:
        raise BackendRefused(
            f"machine '{plan.machine.name}' is a description to plan with; serving runs on this machine: use machine=auto"
        )
    import torch

    from astrai_runtime.agents._stateless import ChatStyle, StatelessAgent
    from astrai_runtime.engine import Engine
    from astrai_runtime.model._load import check_tensors, load_weights
    from astrai_runtime.model._torch import TorchDecoder
    from astrai_runtime.provider.base import ModelInfo
    from astrai_runtime.provider.local import local_provider

    began = time.monotonic()
    deployment = plan.deployment
    located = fetch_files(deployment, progress)
    checkpoint = plan.open(located)
    check_tensors(checkpoint, plan.spec, plan.table)
    tokenizer, chat_template = build_text(plan, located)
    weights = load_weights(
        checkpoint,
        plan.spec,
        plan.table,
        getattr(torch, plan.dtype),
        lambda tensor, done, total: progress("loading weights", done, total),
    )
    checkpoint.close()

    decoder = TorchDecoder(plan.spec, weights, getattr(torch, plan.dtype), device=plan.machine.device)
    backends = {name: part.load("attention", name)() for name in dict.fromkeys(plan.attention.values())}
    kv = part.load("kv", deployment.kv.kind)(deployment.kv, plan.kv_shape)
    kv.attach(*backends[plan.attention["decode"]].allocate(plan.kv_shape, plan.machine.device))
    info = ModelInfo(
        name=deployment.model.name,
        architecture=plan.spec.architecture,
        n_parameters=plan.spec.n_parameters(),
        vocab_size=plan.spec.vocab_size,
        context=plan.context,
        created=int(time.time()),
    )
    provider = local_provider(info, tokenizer, chat_template, kv, decoder, backends, plan.attention)
    engine = Engine(
        provider,
        part.load("scheduler", deployment.scheduler.kind)(deployment.scheduler, kv),
        build_sampler(deployment, tokenizer.vocab_size),
        defaults=sampling_defaults(deployment),
        stream_bytes=deployment.server.stream_bytes,
    )
    chat = deployment.model.chat
    style = ChatStyle(chat.stop, chat.trim_leading_space)
    agent = StatelessAgent(tokenizer, chat_template, style, provider.info.context)
    return Built(engine, agent, time.monotonic() - began)


@contextmanager
def open_engine(*overrides: str, config_dirs: Sequence[str] = ()) -> Iterator[Engine]:
    """A running engine for Python callers: `with open_engine("+recipe=tiny") as engine: engine.generate("Hello")`.

    Raises:
        ConfigError: the configuration is not valid. CapacityExceeded: it does not fit this machine.
        SourceError, WeightsError, BackendRefused: as `build`.
    """
    from astrai_deploy.compose import compose

    plan = make_plan(compose(overrides, config_dirs))
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
    with shown(console) as progress:
        located = fetch_files(composed.deployment, progress)
    console.print(f"{located.origin}: {located.path or 'made in memory, nothing to fetch'}", highlight=False, soft_wrap=True)
    return 0
