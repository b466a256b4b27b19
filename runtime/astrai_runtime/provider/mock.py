"""A model that is a script: it computes logits that spell a declared text, byte by byte, and the rest of the engine is real.

Scheduling, KV accounting, sampling, stop rules, streaming and usage are the ones that every model gets. What is said next
depends on the sequence's tokens alone, so that the same requests get the same bytes in any process and any order.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from astrai_runtime.batch import Batch, Chunk, KVView
from astrai_runtime.errors import ProviderError
from astrai_runtime.kv.base import KVMode
from astrai_runtime.part import Config, PartConfig
from astrai_runtime.provider.base import Materials, Provider, ProviderPart
from astrai_runtime.sequence import Sequence
from astrai_runtime.text._bytes import BOS, EOS, byte_tokenizer
from astrai_runtime.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY = 258
PRINTABLE = (32, 127)  # bytes among which a warm sample may stray: they are characters of their own
UNLIKELY = -30.0  # logit of every other token
# One line a message; for model cards without a template of their own.
TEMPLATE = (
    "{%- for message in messages -%}{{ message['role'] }}: {{ message['content'] }}{{ '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}"
)


class Reply(Config):
    """`say` answers a prompt that holds `when`; without `when`, replies take turns within a conversation."""

    when: str | None
    say: str = Field(min_length=1)


class ToolCall(Config):
    """What mode `tool_call` writes: `<tool_call>`, this as JSON, `</tool_call>`."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any]


class Fault(Config):
    """Requests whose prompt holds `when` (null: all) fail once they have generated `after` tokens.

    error: the step raises; memory: it runs out of memory; nan: its logits are not finite.
    """

    when: str | None
    after: NonNegativeInt
    how: Literal["error", "memory", "nan"]


class MockConfig(PartConfig):
    kind: Literal["mock"]
    mode: Literal["script", "tool_call", "infinite", "echo"]
    replies: Annotated[tuple[Reply, ...], Field(min_length=1)]
    tool_call: ToolCall
    sharpness: Annotated[float, Field(gt=0, le=100)]  # logits between the scripted token and the others
    delay_ms: NonNegativeFloat  # that every step takes longer
    check_kv: bool  # read every context back from the KV pool, and fail the request whose pages are not its own
    faults: tuple[Fault, ...]

    @model_validator(mode="after")
    def _somebody_answers(self) -> Self:
        if all(reply.when is not None for reply in self.replies):
            raise ValueError("at least one of replies needs `when: null`: it answers what no other one does")
        return self


class MockProvider(ProviderPart):
    """Spells the script. Used by one engine thread."""

    Config: ClassVar[type[MockConfig]] = MockConfig
    needs_weights = False
    answers = "logits"

    def __init__(self, config: MockConfig, kv: KVMode) -> None:
        self._config = config
        self._kv = kv
        self._free = [reply.say for reply in config.replies if reply.when is None]
        self._scripts: dict[int, bytes] = {}  # of the sequences of the last step, by id
        self._base: Tensor | None = None

    @classmethod
    def open(cls, config: MockConfig, materials: Materials) -> Provider:
        import torch

        kv, tokenizer = materials.kv(), byte_tokenizer()
        size = (kv.shape.n_layers, kv.shape.n_tokens, kv.shape.n_kv_heads, kv.shape.head_dim)
        dtype = getattr(torch, kv.shape.dtype)
        kv.attach(torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype))
        mock = cls(config, kv)
        return Provider(
            info=replace(materials.info, vocab_size=VOCABULARY, context=min(materials.info.context, kv.shape.n_tokens)),
            tokenizer=tokenizer,
            chat_template=ChatTemplate(TEMPLATE if materials.template == "auto" else materials.template, tokenizer),
            kv=kv,
            run=mock.run,
            close=mock.close,
            backends=frozenset(materials.phases.values()),
        )

    def run(self, batch: Batch) -> Tensor:
        """Float32 logits [S, V] of one step.

        Raises:
            ProviderError: a declared fault, or a context that is not in the KV pool as it was put there.
        """
        import torch

        if self._config.delay_ms:
            time.sleep(self._config.delay_ms / 1000)
        for sequence in batch.sampled:
            self._raise_fault(sequence)
        if self._config.check_kv:
            self._through_kv(batch, self._kv.place(batch))
        if self._base is None:
            self._base = torch.full((VOCABULARY,), UNLIKELY)
            self._base[slice(*PRINTABLE)] = 0.0
        logits = self._base.repeat(len(batch.sampled), 1)
        scripts = {sequence.id: self._script(sequence) for sequence in batch.sampled}
        for row, sequence in zip(logits, batch.sampled, strict=True):
            row[self._next(scripts[sequence.id], sequence.n_generated)] = self._config.sharpness
            if any(fault.how == "nan" for fault in self._due(sequence)):
                row.fill_(torch.nan)
        self._scripts = scripts
        return logits

    def close(self) -> None:
        """Nothing is held. Safe to call twice."""
        self._scripts.clear()

    def _script(self, sequence: Sequence) -> bytes:
        """What this sequence says in all."""
        known = self._scripts.get(sequence.id)
        return self._written(prompt_of(sequence)) if known is None else known

    def _written(self, prompt: bytes) -> bytes:
        match self._config.mode:
            case "echo":
                return prompt
            case "tool_call":
                call = json.dumps(self._config.tool_call.model_dump(), ensure_ascii=False)
                return f"<tool_call>\n{call}\n</tool_call>".encode()
            case _:
                return self._reply(prompt).encode()

    def _reply(self, prompt: bytes) -> str:
        """The reply whose `when` comes last in the prompt; else the next of the free ones that were not said in it yet."""
        places = {reply.say: prompt.rfind(reply.when.encode()) for reply in self._config.replies if reply.when is not None}
        best = max(places, key=places.__getitem__, default="")
        if places.get(best, -1) >= 0:
            return best
        said = sum(prompt.count(each.encode()) for each in set(self._free))
        return self._free[said % len(self._free)]

    def _next(self, script: bytes, position: int) -> int:
        if self._config.mode == "infinite":
            return script[position % len(script)]
        return script[position] if position < len(script) else EOS

    def _due(self, sequence: Sequence) -> list[Fault]:
        """The faults that this step of the sequence is to meet."""
        faults = [fault for fault in self._config.faults if sequence.n_generated == fault.after]
        return [fault for fault in faults if fault.when is None or fault.when.encode() in prompt_of(sequence)]

    def _raise_fault(self, sequence: Sequence) -> None:
        for fault in self._due(sequence):
            if fault.how == "memory":
                raise MemoryError(f"declared fault after {fault.after} tokens")
            if fault.how == "error":
                raise ProviderError(f"declared fault after {fault.after} tokens")

    def _through_kv(self, batch: Batch, view: KVView) -> None:
        """Stores this step's token ids as keys, then reads every whole context back through the index table."""
        import torch

        keys = view.k_buffer[0, :, 0, 0]
        keys[view.out_cache_loc] = torch.tensor(batch.token_ids, dtype=keys.dtype)
        for chunk, row in zip(batch.chunks, view.req_pool_indices.tolist(), strict=True):
            slots = view.req_to_token[row, : chunk.end].long()
            if not torch.equal(keys[slots], _as_keys(chunk, keys)):
                raise ProviderError("the KV pool lost or mixed up this request's tokens")


def prompt_of(sequence: Sequence) -> bytes:
    """A prompt's text; its control tokens leave nothing."""
    return bytes(token for token in sequence.prompt.token_ids if token < BOS)


def _as_keys(chunk: Chunk, keys: Tensor) -> Tensor:
    import torch

    return torch.tensor(chunk.sequence.tokens[: chunk.end], dtype=keys.dtype)


PART = MockProvider
