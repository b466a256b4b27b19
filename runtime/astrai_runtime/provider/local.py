"""The model runs in this process: places each step in the KV pool and calls the decoder with the phase's backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from astrai_runtime.attention.base import AttentionBackend, Phase
from astrai_runtime.batch import Batch
from astrai_runtime.errors import BackendRefused
from astrai_runtime.kv.base import KVMode
from astrai_runtime.part import PartConfig
from astrai_runtime.provider.base import Decoder, Materials, ModelInfo, Provider, ProviderPart
from astrai_runtime.text.chat_template import ChatTemplate
from astrai_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


class LocalConfig(PartConfig):
    kind: Literal["local"]


class LocalProvider(ProviderPart):
    """`run` for a decoder whose weights and KV pool are in this process."""

    Config: ClassVar[type[LocalConfig]] = LocalConfig
    needs_weights = True
    answers = "logits"

    def __init__(
        self, kv: KVMode, decoder: Decoder, backends: Mapping[str, AttentionBackend], phases: Mapping[Phase, str]
    ) -> None:
        missing = sorted(set(phases.values()) - set(backends))
        assert not missing, f"phases name backends that were not built: {missing}"
        self._kv = kv
        self._decoder: Decoder | None = decoder
        self._backends = dict(backends)
        self._phases = dict(phases)

    @classmethod
    def open(cls, config: LocalConfig, materials: Materials) -> Provider:
        tokenizer, template = materials.text()
        decoder = materials.decoder()  # before the pool: what loading holds is gone when the pool comes
        backends, phases, kv = materials.backends(), materials.phases, materials.kv()
        kv.attach(*backends[phases["decode"]].allocate(kv.shape, materials.device))
        return local_provider(materials.info, tokenizer, template, kv, decoder, backends, phases)

    def run(self, batch: Batch) -> Tensor:
        """Float32 logits [S, V] of one step; writes its keys and values.

        Raises:
            BackendRefused: the batch requires a backend that was not built.
        """
        assert self._decoder is not None, "run() after close()"
        phase: Phase = "decode" if all(chunk.length == 1 for chunk in batch.chunks) else "prefill"
        name = batch.backend or self._phases[phase]
        if name not in self._backends:
            there = ", ".join(sorted(self._backends))
            raise BackendRefused(f"attention: '{name}' was required, but this deployment runs: {there}")
        return self._decoder(batch, self._kv.place(batch), self._backends[name])

    def close(self) -> None:
        """Lets the weights go, and the threads of a native decoder. Safe to call twice."""
        close = getattr(self._decoder, "close", None)
        self._decoder = None
        if close is not None:
            close()


def local_provider(
    info: ModelInfo,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    kv: KVMode,
    decoder: Decoder,
    backends: Mapping[str, AttentionBackend],
    phases: Mapping[Phase, str],
) -> Provider:
    """The operations table over a decoder. `kv` has its storage attached; `phases` name the plan's choice per phase.

    Its `info.context` is never more than the pool can hold of one sequence.
    """
    local = LocalProvider(kv, decoder, backends, phases)
    return Provider(
        info=replace(info, context=min(info.context, kv.shape.n_tokens)),
        tokenizer=tokenizer,
        chat_template=chat_template,
        kv=kv,
        run=local.run,
        close=local.close,
        backends=frozenset(backends),
    )


PART = LocalProvider
