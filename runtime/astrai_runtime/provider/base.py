"""The contract of a provider: it computes, the engine decides. Operations tables, not an inheritance tree.

A provider answers in logits (`Provider`: the engine samples, stops and detokenizes) or in text (`TextProvider`: another
service did all of that, and a relay passes it on). What a table may lack is None; whoever asks for it through `operation`
gets Unsupported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from astrai_runtime.attention.base import AttentionBackend, Phase
from astrai_runtime.batch import Batch, KVView
from astrai_runtime.errors import Unsupported
from astrai_runtime.event import Event
from astrai_runtime.kv.base import KVMode
from astrai_runtime.part import PartConfig
from astrai_runtime.request import Prompt, Turn
from astrai_runtime.text.chat_template import ChatTemplate
from astrai_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

Decoder = Callable[[Batch, KVView, AttentionBackend], "Tensor"]  # float32 logits [S, V]; see model/_torch.py


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What callers may know about the model. `context`: tokens that one sequence may hold, prompt and answer together.

    A number that nobody knows is 0: of a model elsewhere.
    """

    name: str
    architecture: str
    n_parameters: int
    vocab_size: int
    context: int
    created: int  # unix seconds, for /v1/models


@dataclass(frozen=True, slots=True)
class Vectors:
    """Embeddings of several texts, in their order, and the tokens that were read."""

    rows: tuple[tuple[float, ...], ...]
    prompt_tokens: int


Embed = Callable[[Sequence[str]], Vectors]  # from any thread; blocks
Complete = Callable[[Prompt], AsyncGenerator[Event, None]]
Count = Callable[[Turn], "tuple[int, ...] | None"]  # token ids of a turn's prompt; None: it cannot say; from any thread


@dataclass(frozen=True, slots=True)
class Provider:
    """The operations of a provider that computes logits; the engine samples, stops and detokenizes.

    `run` gets the step's batch, every chunk of it covered by `kv.extend`, and returns float32 logits [S, V], one row for
    each of `batch.sampled`. It is called by the engine thread only. The caller may edit the result in place.
    """

    info: ModelInfo
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    kv: KVMode
    run: Callable[[Batch], Tensor]
    close: Callable[[], None]
    backends: frozenset[str] = frozenset()  # attention backends that a request may require by name
    embed: Embed | None = None

    def __post_init__(self) -> None:
        _check(self, ("info", "tokenizer", "kv", "run", "close"))

    @property
    def capabilities(self) -> frozenset[str]:
        """Names of the operations that work here, besides the required ones."""
        return _offered(self, ("embed",)) | {"logits", "tokenize"}


@dataclass(frozen=True, slots=True)
class TextProvider:
    """The operations of a provider that answers in text: sampling, stop rules and end of text are its own.

    `complete` runs on one event loop: deltas, then Finished, or an AstraiError; closing the generator early ends the work
    behind it. `tokenize` and `embed` may be called from any thread and block. `close` comes after the loop's end.
    """

    info: ModelInfo
    complete: Complete
    close: Callable[[], None]
    tokenize: Count | None = None
    embed: Embed | None = None

    def __post_init__(self) -> None:
        _check(self, ("info", "complete", "close"))

    @property
    def capabilities(self) -> frozenset[str]:
        """Names of the operations that work here, besides the required ones."""
        return _offered(self, ("tokenize", "embed")) | {"text"}


def operation(table: Provider | TextProvider, name: str) -> Callable[..., Any]:
    """An optional operation by name.

    Raises:
        Unsupported: this provider lacks it; the message lists what it can do.
    """
    found: Callable[..., Any] | None = getattr(table, name, None)
    if found is None:
        there = ", ".join(sorted(table.capabilities))
        raise Unsupported(f"the provider of model '{table.info.name}' cannot '{name}'; it can: {there}")
    return found


def _check(table: object, required: Sequence[str]) -> None:
    missing = [name for name in required if getattr(table, name) is None]
    if missing:
        raise Unsupported(f"a {type(table).__name__} needs {', '.join(missing)}: every provider has these operations")


def _offered(table: object, optional: Sequence[str]) -> frozenset[str]:
    return frozenset(name for name in optional if getattr(table, name) is not None)


class Materials(Protocol):
    """What the plan has for a provider. Methods make what they return when they are called: only what is needed exists."""

    @property
    def info(self) -> ModelInfo:
        """The declared model, with the plan's context."""
        ...

    @property
    def template(self) -> str:
        """The declared chat template: Jinja, or `auto` for the model's own."""
        ...

    @property
    def sampling(self) -> tuple[str, ...]:
        """The sampling fields that the declared pipeline obeys."""
        ...

    @property
    def device(self) -> str:
        """torch's name of the device that the plan chose."""
        ...

    @property
    def phases(self) -> Mapping[Phase, str]:
        """The plan's attention backend of each phase."""
        ...

    def text(self) -> tuple[Tokenizer, ChatTemplate | None]:
        """From the model's files."""
        ...

    def decoder(self) -> Decoder:
        """The model with its weights: fetches and reads its files."""
        ...

    def kv(self) -> KVMode:
        """The planned KV mode; its storage is still to be attached."""
        ...

    def backends(self) -> Mapping[str, AttentionBackend]:
        """The backends that `phases` name."""
        ...


class ProviderPart(ABC):
    """What a file of `provider/` offers. `PART.Config` is its YAML.

    `needs_weights` False: the model card's files are neither looked for nor planned; only its name, context and chat
    settings count.
    """

    Config: ClassVar[type[PartConfig]]
    needs_weights: ClassVar[bool]
    answers: ClassVar[Literal["logits", "text"]]

    @classmethod
    @abstractmethod
    def open(cls, config: Any, materials: Materials) -> Provider | TextProvider:
        """The operations table, ready to be used. `config` is an instance of `Config`.

        Raises:
            AstraiError: files are missing or damaged, or a service does not answer; nothing was started.
        """
