"""The contract of a provider: who computes logits. An operations table, not an inheritance tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from astrai_runtime.batch import Batch
from astrai_runtime.kv.base import KVMode
from astrai_runtime.text.chat_template import ChatTemplate
from astrai_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What callers may know about the model. `context`: tokens that one sequence may hold, prompt and answer together."""

    name: str
    architecture: str
    n_parameters: int
    vocab_size: int
    context: int
    created: int  # unix seconds, for /v1/models


@dataclass(frozen=True, slots=True)
class Provider:
    """The operations that the engine needs; the core decides (samples, stops, detokenizes), the provider computes.

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
