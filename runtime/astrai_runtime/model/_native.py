"""The native program of a decoder on a CPU: runs any DecoderSpec over packed matrices, one call a step.

It computes what the torch interpreter computes, with the residual stream in float32 throughout. T tokens in the step,
B sequences, S rows whose logits are needed, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from astrai_runtime.attention.base import AttentionBackend
from astrai_runtime.batch import Batch, KVView
from astrai_runtime.kernels.base import FORMATS, TILE, Isa, padded
from astrai_runtime.kernels.cpu import KV, Decoder, Layer, Library, Pool, Program, Step
from astrai_runtime.model._pack import PackedModel
from astrai_runtime.model._rope import frequencies
from astrai_runtime.model.base import DecoderSpec

ACTIVATIONS = ("silu", "gelu_tanh")  # their places are the numbers of astrai_cpu.h

Int32s = npt.NDArray[np.int32]


class NativeDecoder:
    """A decoder with its weights packed, ready to run in the threads of `pool`.

    A sequence's logits are the same bit for bit whatever its neighbours, the chunks of its prompt, the page size and the
    number of threads. They differ between instruction sets.

    Args:
        kv_dtype: of the keys and values in the pool.
        max_tokens, max_logits: of the largest step that is expected; memory for it is taken now, and more when needed.
    """

    def __init__(
        self,
        library: Library,
        spec: DecoderSpec,
        packed: PackedModel,
        pool: Pool,
        *,
        isa: Isa,
        kv_dtype: Literal["float32", "bfloat16"],
        max_tokens: int,
        max_logits: int,
    ) -> None:
        self.spec = spec
        self._pool = pool
        self._vocab = spec.vocab_size
        self._logits = torch.empty(max(max_logits, 1), padded(spec.vocab_size, TILE))
        decoder, keep = _describe(spec, packed, kv_dtype)
        self._program: Program | None = library.program_open(
            isa, decoder, pool, max_tokens=max_tokens, max_logits=max_logits, keep=(packed, *keep)
        )

    def __call__(self, batch: Batch, view: KVView, attention: AttentionBackend) -> Tensor:
        """[S, V] float32: the next token's logits after each sampled chunk. Writes the step's keys and values.

        The result is the caller's to edit, until the next call writes its own there.

        Raises:
            KernelError: a token is outside the vocabulary; nothing was computed.
        """
        assert self._program is not None, "a step after close()"
        token_ids = np.array(batch.token_ids, np.int32)
        positions = np.array(batch.positions, np.int32)
        starts = view.qo_indptr.numpy()
        rows = view.req_pool_indices.numpy().astype(np.int32)
        logit_rows = np.array(batch.logit_rows, np.int32)
        if len(logit_rows) > len(self._logits):
            self._logits = torch.empty(len(logit_rows), self._logits.shape[1])
        step = Step(
            n_tokens=len(token_ids),
            n_sequences=len(rows),
            n_logits=len(logit_rows),
            token_ids=token_ids.ctypes.data,
            positions=positions.ctypes.data,
            starts=starts.ctypes.data,
            rows=rows.ctypes.data,
            logit_rows=logit_rows.ctypes.data,
            logits=self._logits.data_ptr(),
            logits_stride=self._logits.shape[1],
            kv=KV(
                k=view.k_buffer.data_ptr(),
                v=view.v_buffer.data_ptr(),
                layer_stride=view.k_buffer.stride(0) * view.k_buffer.element_size(),
                table=view.req_to_token.data_ptr(),
                table_stride=view.req_to_token.stride(0),
            ),
        )
        self._program.run(step)
        return self._logits[: len(logit_rows), : self._vocab]

    def scratch_bytes(self) -> int:
        """Memory besides the weights and the KV pool, held now."""
        assert self._program is not None, "asked after close()"
        return self._program.bytes() + self._logits.nbytes

    def profile(self) -> dict[str, float]:
        """Seconds that the parts of all steps since the last call took."""
        assert self._program is not None, "asked after close()"
        return self._program.profile()

    def close(self) -> None:
        """Lets the weights and the threads go. Safe to call twice."""
        if self._program is not None:
            self._program.close()
            self._program = None
            self._pool.close()


def _describe(spec: DecoderSpec, packed: PackedModel, kv_dtype: Literal["float32", "bfloat16"]) -> tuple[Decoder, list[Any]]:
    """The C interface's description of a decoder, and what owns the memory that it points at."""
    keep: list[Any] = []

    def address(array: npt.NDArray[np.float32] | None) -> int | None:
        if array is None:
            return None
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        keep.append(array)
        return int(array.ctypes.data)

    def pointers(arrays: Sequence[npt.NDArray[np.float32]]) -> int:
        table = (ctypes.c_void_p * len(arrays))(*(address(array) for array in arrays))
        keep.append(table)
        return ctypes.addressof(table)

    ropes = list(dict.fromkeys(layer.rope for layer in spec.layers))
    factors = packed.vectors.get("rope_factors")
    turning = [frequencies(rope, None if factors is None else torch.from_numpy(factors)) for rope in ropes]
    layers = (Layer * spec.n_layers)()
    keep.append(layers)
    for index, layer in enumerate(spec.layers):
        at = f"layers.{index}."
        names = ("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "q_norm", "k_norm")
        biases = ("qkv_bias", "o_bias", "gate_up_bias", "down_bias")
        layers[index] = Layer(
            n_heads=layer.n_heads,
            n_kv_heads=layer.n_kv_heads,
            head_dim=layer.head_dim,
            intermediate=layer.intermediate_size,
            window=layer.window or 0,
            activation=ACTIVATIONS.index(layer.activation),
            rope=ropes.index(layer.rope),
            scale=layer.scale,
            **{name: address(packed.vectors.get(at + name)) for name in (*names, *biases)},
            **{name: packed.matrices[at + name].struct for name in ("qkv", "o", "gate_up", "down")},
        )
    decoder = Decoder(
        hidden=spec.hidden_size,
        vocab=spec.vocab_size,
        n_layers=spec.n_layers,
        n_ropes=len(ropes),
        kv_format=FORMATS.index(kv_dtype),
        norm_eps=spec.norm_eps,
        embedding_scale=_embedding_scale(spec, packed),
        final_norm=address(packed.vectors["final_norm"]),
        embed=packed.matrices["embed"].struct,
        head=packed.matrices["head"].struct,
        layers=ctypes.addressof(layers),
        frequencies=pointers([turn.numpy() for turn, _ in turning]),
        rope_factors=address(np.array([factor for _, factor in turning], np.float32)),
    )
    return decoder, keep


def _embedding_scale(spec: DecoderSpec, packed: PackedModel) -> float:
    """Rounded as the model in bfloat16 rounds it; otherwise as in float32."""
    dtype = torch.bfloat16 if packed.matrices["embed"].shape.format == "bfloat16" else torch.float32
    return float(torch.tensor(spec.embedding_scale, dtype=dtype))
