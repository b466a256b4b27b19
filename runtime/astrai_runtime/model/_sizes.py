"""The numbers that every family has, and the specs that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from astrai_runtime.model.base import DecoderSpec, LayerSpec, RopeSpec

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Read from config.json or from GGUF metadata; the family adds what is its own."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    activation: Activation
    tied_head: bool

    def layer(
        self,
        rope: RopeSpec,
        *,
        scale: float | None = None,
        window: int | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        post_norms: bool = False,
    ) -> LayerSpec:
        """One layer of these sizes. `scale` None: one over the square root of the head size."""
        return LayerSpec(
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            rope=rope,
            scale=self.head_dim**-0.5 if scale is None else scale,
            window=window,
            activation=self.activation,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            post_norms=post_norms,
        )

    def decoder(
        self, architecture: str, layers: Sequence[LayerSpec], *, norm_offset: float = 0.0, embedding_scale: float = 1.0
    ) -> DecoderSpec:
        """The whole decoder over these layers."""
        return DecoderSpec(
            architecture=architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=tuple(layers),
            norm_eps=self.norm_eps,
            context=self.context,
            tied_head=self.tied_head,
            norm_offset=norm_offset,
            embedding_scale=embedding_scale,
        )
