"""The torch interpreter: runs any DecoderSpec, and is the reference for every other program.

T tokens in the step, S rows whose logits are needed, C hidden size, V vocabulary, H query heads, K key/value heads,
D head size, F width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from astrai_runtime.attention.base import AttentionBackend
from astrai_runtime.batch import Batch, KVView
from astrai_runtime.model._rope import cos_sin, frequencies, rotate
from astrai_runtime.model.base import DecoderSpec, LayerSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's tensors, projections that read the same input laid one below the other. Norms are float32."""

    spec: LayerSpec
    attn_norm: Tensor
    qkv: Tensor  # [(H + 2K) * D, C]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [H + K, D]
    o: Tensor
    o_bias: Tensor | None
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor  # [2F, C]
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    post_mlp_norm: Tensor | None


class TorchDecoder:
    """A decoder with its weights on one device.

    Args:
        weights: every tensor of `spec.tensor_shapes()`. The decoder takes them over and empties the mapping, layer by
            layer, so that joining projections never holds more than one layer twice.
        dtype: of weights and activations; norms and rotary angles are computed in float32 whatever it is.
    """

    def __init__(
        self, spec: DecoderSpec, weights: dict[str, Tensor], dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        with torch.inference_mode():
            factors = weights.pop("rope_factors.weight", None)
            self._ropes: dict[RopeSpec, tuple[Tensor, float]] = {}
            for rope in dict.fromkeys(layer.rope for layer in spec.layers):
                turning, factor = frequencies(rope, factors)
                self._ropes[rope] = (turning.to(self.device), factor)
            self._embed = weights.pop("embed.weight").to(self.device, dtype)
            # Rounded to the weights' dtype before it is applied, as Gemma was trained.
            self._embed_scale = torch.tensor(spec.embedding_scale).to(self.device, dtype)
            self._layers = [self._layer(index, weights) for index in range(spec.n_layers)]
            self._final_norm = self._norm_weight(weights.pop("final_norm.weight"))
            self._head = self._embed if spec.tied_head else weights.pop("head.weight").to(self.device, dtype)
        assert not weights, f"nothing uses {sorted(weights)}"

    def _layer(self, index: int, weights: dict[str, Tensor]) -> _Layer:
        spec = self.spec.layers[index]
        at = f"layers.{index}."

        def joined(kind: str, *names: str) -> Tensor:
            parts = [weights.pop(f"{at}{name}.{kind}").to(self.device, self.dtype) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        def norm(name: str) -> Tensor:
            return self._norm_weight(weights.pop(f"{at}{name}.weight"))

        qk_norm = None
        if spec.qk_norm:
            heads = (norm("q_norm").expand(spec.n_heads, -1), norm("k_norm").expand(spec.n_kv_heads, -1))
            qk_norm = torch.cat(heads)
        return _Layer(
            spec=spec,
            attn_norm=norm("attn_norm"),
            qkv=joined("weight", "q", "k", "v"),
            qkv_bias=joined("bias", "q", "k", "v") if spec.qkv_bias else None,
            qk_norm=qk_norm,
            o=joined("weight", "o"),
            o_bias=joined("bias", "o") if spec.o_bias else None,
            post_attn_norm=norm("post_attn_norm") if spec.post_norms else None,
            mlp_norm=norm("mlp_norm"),
            gate_up=joined("weight", "gate", "up"),
            gate_up_bias=joined("bias", "gate", "up") if spec.mlp_bias else None,
            down=joined("weight", "down"),
            down_bias=joined("bias", "down") if spec.mlp_bias else None,
            post_mlp_norm=norm("post_mlp_norm") if spec.post_norms else None,
        )

    def _norm_weight(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, torch.float) + self.spec.norm_offset

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension, in float32, rounded once."""
        return functional.rms_norm(x.to(torch.float), weight.shape, weight, self.spec.norm_eps).to(self.dtype)

    @torch.inference_mode()
    def __call__(self, batch: Batch, view: KVView, attention: AttentionBackend) -> Tensor:
        """[S, V] float32: the next token's logits after each sampled chunk. Writes the step's keys and values.

        The result is the caller's to edit.
        """
        x_TC = functional.embedding(torch.tensor(batch.token_ids, device=self.device), self._embed)
        if self.spec.embedding_scale != 1.0:
            x_TC = x_TC * self._embed_scale
        positions_T = torch.tensor(batch.positions, device=self.device)
        turns = {rope: cos_sin(positions_T, *of, self.dtype) for rope, of in self._ropes.items()}
        for index, layer in enumerate(self._layers):
            x_TC = self._attend(index, layer, x_TC, turns[layer.spec.rope], view, attention)
            if index == len(self._layers) - 1:  # past the last attention only the rows that are sampled matter
                x_TC = x_TC.index_select(0, torch.tensor(batch.logit_rows, dtype=torch.int64, device=self.device))
            x_TC = self._feed_forward(layer, x_TC)
        return functional.linear(self._norm(x_TC, self._final_norm), self._head).to(torch.float)

    def _attend(
        self,
        index: int,
        layer: _Layer,
        x_TC: Tensor,
        turn: tuple[Tensor, Tensor],
        view: KVView,
        attention: AttentionBackend,
    ) -> Tensor:
        spec = layer.spec
        H, K, D = spec.n_heads, spec.n_kv_heads, spec.head_dim
        qkv = functional.linear(self._norm(x_TC, layer.attn_norm), layer.qkv, layer.qkv_bias).view(-1, H + 2 * K, D)
        qk, v_TKD = qkv[:, : H + K], qkv[:, H + K :]
        if layer.qk_norm is not None:
            normed = functional.rms_norm(qk.to(torch.float), (D,), None, self.spec.norm_eps)
            qk = (normed * layer.qk_norm).to(self.dtype)
        qk = rotate(qk, *turn)
        out_THD = attention.attend(index, qk[:, :H], qk[:, H:], v_TKD, view, scale=spec.scale, window=spec.window)
        out_TC = functional.linear(out_THD.reshape(-1, H * D), layer.o, layer.o_bias)
        if layer.post_attn_norm is not None:
            out_TC = self._norm(out_TC, layer.post_attn_norm)
        return x_TC + out_TC

    def _feed_forward(self, layer: _Layer, x_TC: Tensor) -> Tensor:
        gate_TF, up_TF = functional.linear(self._norm(x_TC, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(
            2, dim=-1
        )
        gated = functional.silu(gate_TF) if layer.spec.activation == "silu" else functional.gelu(gate_TF, approximate="tanh")
        out_TC = functional.linear(gated * up_TF, layer.down, layer.down_bias)
        if layer.post_mlp_norm is not None:
            out_TC = self._norm(out_TC, layer.post_mlp_norm)
        return x_TC + out_TC
