"""One running generation: tokens, where they are in the KV cache, and its way out. Owned by the engine thread."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Protocol

from astrai_runtime.event import Outcome
from astrai_runtime.request import Prompt
from astrai_runtime.stream import Stream

_ids = itertools.count(1)


class Detokenizer(Protocol):
    """Turns token ids into bytes that are safe to show (see `text/decoder.py`)."""

    def push(self, token_id: int) -> bytes:
        """The bytes that this token makes certain; text that may begin a stop string is held back."""
        ...

    def finish(self) -> bytes:
        """What was held back, once no more tokens will come."""
        ...

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was completed, if any."""
        ...


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one generation.

    `tokens` is the prompt followed by what was generated. The first `n_computed` of them have their keys and values in
    the cache; a sequence that has all but its last token computed is decoding. `row` is its row in the request-to-token
    table while it is admitted, None while it waits.
    """

    prompt: Prompt
    stream: Stream
    detokenizer: Detokenizer
    max_tokens: int  # tokens that may be generated
    id: int = field(default_factory=lambda: next(_ids))
    tokens: list[int] = field(default_factory=list)
    n_computed: int = 0
    n_cached: int = 0  # prompt tokens whose KV came from the prefix cache
    row: int | None = None
    pending: bytearray = field(default_factory=bytearray)  # bytes that the stream had no room for
    arrived_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None  # when the first step that computes its tokens began
    first_token_at: float | None = None
    last_token_at: float | None = None
    preemptions: int = 0  # times that its KV was taken away for an older sequence
    overtaken: int = 0  # times that a later one of higher priority was served first
    sampler_state: dict[str, float] = field(default_factory=dict)  # what sampling stages remember of this sequence
    outcome: Outcome | None = None  # decided; the stream learns of it once the pending bytes are delivered

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt.token_ids)

    @property
    def n_prompt(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - len(self.prompt.token_ids)

    @property
    def n_uncomputed(self) -> int:
        """Tokens that still have to pass through the model; 1 while decoding."""
        return len(self.tokens) - self.n_computed

    @property
    def decoding(self) -> bool:
        return self.n_uncomputed == 1 and self.n_generated > 0

    @property
    def ended(self) -> bool:
        """Nothing more is computed for it; its place may still be taken until the reader has seen the end."""
        return self.outcome is not None

    @property
    def paused(self) -> bool:
        """Its reader is slow: nothing more is computed for it until there is room in its stream."""
        return bool(self.pending) or self.stream.room == 0


class SequenceFault(Exception):
    """The KV mode raised `error` while it worked for `sequence`: its accounting may be damaged."""

    def __init__(self, sequence: Sequence, error: Exception) -> None:
        super().__init__(f"sequence {sequence.id}: {error!r}")
        self.sequence, self.error = sequence, error
