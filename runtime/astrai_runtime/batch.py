"""What one step computes (Batch) and where its keys and values lie (KVView). Siblings of layer 1 meet here.

Shape suffixes, used in every file of the engine:
    B sequences in the step     T tokens in the step (all sequences packed, no padding)
    S rows whose logits are needed      V vocabulary      L layers      N token slots in the pool
    H query heads      K key/value heads      D head size      C hidden size      M longest context in the step
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """`length` tokens of one sequence, beginning at position `start`. `sampled`: its last token's logits are wanted."""

    sequence: Sequence
    start: int
    length: int
    sampled: bool

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Batch:
    """The chunks of one step, at least one, at most one of each sequence, all with the same `backend`. No tensors."""

    chunks: tuple[Chunk, ...]

    @cached_property
    def token_ids(self) -> list[int]:
        """T token ids, sequence after sequence."""
        return [token for chunk in self.chunks for token in chunk.sequence.tokens[chunk.start : chunk.end]]

    @cached_property
    def positions(self) -> list[int]:
        """T positions, each within its own sequence."""
        return [position for chunk in self.chunks for position in range(chunk.start, chunk.end)]

    @cached_property
    def sampled(self) -> tuple[Sequence, ...]:
        """The S sequences that get a next token, in the order of the logits' rows."""
        return tuple(chunk.sequence for chunk in self.chunks if chunk.sampled)

    @cached_property
    def logit_rows(self) -> list[int]:
        """S indices into the T tokens."""
        rows, end = [], 0
        for chunk in self.chunks:
            end += chunk.length
            if chunk.sampled:
                rows.append(end - 1)
        return rows

    @property
    def backend(self) -> str | None:
        """The attention backend that every sequence of this step requires, None for the plan's choice."""
        return self.chunks[0].sequence.prompt.backend

    @property
    def n_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class KVView:
    """Where the keys and values of one step lie: buffers and index tables, no methods.

    The keys in `k_buffer` are already rotated. `seq_lens` counts each sequence's tokens after this step.
    """

    k_buffer: Tensor  # [L, N, K, D] in the model's KV dtype (layout of the attention backend)
    v_buffer: Tensor  # [L, N, K, D]
    req_to_token: Tensor  # [rows, max context] int32: token slot of each position
    req_pool_indices: Tensor  # [B] int64: each sequence's row in req_to_token
    seq_lens: Tensor  # [B] int32
    out_cache_loc: Tensor  # [T] int64: slot that each of the step's tokens is written to
    max_len: int  # max(seq_lens), known on the host
    kv_indptr: Tensor  # [B + 1] int32: prefix sum of seq_lens
    qo_indptr: Tensor  # [B + 1] int32: prefix sum of each sequence's tokens in this step
    query_lens: tuple[int, ...]  # the step's tokens per sequence, on the host
    context_lens: tuple[int, ...]  # seq_lens, on the host
