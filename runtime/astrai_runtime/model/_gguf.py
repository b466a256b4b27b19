"""What the families share in GGUF metadata and tensor names (the format: github.com/ggml-org/ggml, docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from astrai_runtime.errors import WeightsError
from astrai_runtime.model._keys import Keys
from astrai_runtime.model._rope_spec import temperature, yarn
from astrai_runtime.model._sizes import Activation, Sizes
from astrai_runtime.model.base import DecoderSpec, RopeSpec, TensorSource

NAMES = {
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_attn_norm": "post_attention_norm",
    "post_mlp_norm": "post_ffw_norm",
}
OUTER = {"embed": "token_embd", "final_norm": "output_norm", "head": "output", "rope_factors": "rope_freqs"}

Shapes = Mapping[str, tuple[int, ...]]


def sizes(keys: Keys, tensors: Shapes, activation: Activation = "silu") -> Sizes:
    """Reads them; `keys` has the architecture's prefix. The head is tied when the file has no `output.weight`.

    The format has no key for the activation: it is the family's.
    """
    keys.refuse("expert_count", "mixtures of experts are not supported")
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    kv_heads = keys.count("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise keys.wrong("attention.head_count_kv", kv_heads, f"a divisor of attention.head_count, which is {heads}")
    head_dim = keys.count("attention.key_length", hidden // heads)
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise keys.wrong("attention.value_length", keys.get("attention.value_length"), f"the key length, {head_dim}")
    if "token_embd.weight" not in tensors:
        raise WeightsError("the file lacks the tensor token_embd.weight")
    return Sizes(
        vocab_size=tensors["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=keys.count("feed_forward_length"),
        n_layers=keys.count("block_count"),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        context=keys.count("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        activation=activation,
        tied_head="output.weight" not in tensors,
    )


def rope(keys: Keys, tensors: Shapes, head_dim: int, context: int, default_theta: float = 10000.0) -> RopeSpec:
    """The rotary setting. Scaling factors that come as a tensor take the place of a llama3 formula."""
    theta = keys.number("rope.freq_base", default_theta)
    dim = keys.count("rope.dimension_count", head_dim)
    if dim > head_dim or dim % 2:
        raise keys.wrong("rope.dimension_count", dim, f"even and at most the head size, {head_dim}")
    kind = keys.word("rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        if kind not in ("none", "linear"):
            raise keys.wrong("rope.scaling.type", kind, "'none' in a file with rope_freqs.weight")
        return RopeSpec(theta, dim, "factors")
    if kind == "linear":
        return RopeSpec(theta, dim, "linear", (("factor", keys.number("rope.scaling.factor")),))
    if kind == "yarn":
        factor = keys.number("rope.scaling.factor")
        strength = keys.number("rope.scaling.attn_factor", keys.number("rope.scaling.yarn_attn_factor", 1.0))
        values = {
            "attention_factor": strength * temperature(factor),
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
        }
        return yarn(theta, dim, factor, keys.count("rope.scaling.original_context_length", context), Keys(values))
    if kind == "none":
        # Files of 2023 wrote the linear factor under a key of its own.
        old = keys.number("rope.scale_linear", 1.0)
        return RopeSpec(theta, dim, "linear", (("factor", old),)) if old != 1.0 else RopeSpec(theta, dim)
    raise keys.wrong("rope.scaling.type", kind, "one of none, linear, yarn")


class Biases(TypedDict):
    """The fields of LayerSpec that say which projections have a bias."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool


def biases(tensors: Shapes) -> Biases:
    """GGUF has no keys for biases: their tensors say it."""
    return Biases(
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
    )


def tensor_names(spec: DecoderSpec, *, interleaved: bool = False) -> dict[str, TensorSource]:
    """Canonical name -> tensor of the file. `interleaved`: the converter permuted query and key rows (llama)."""
    table = {}
    for name in spec.tensor_shapes():
        part, kind = name.rsplit(".", 1)
        heads = 0
        if part.startswith("layers."):
            _, index, part = part.split(".")
            layer = spec.layers[int(index)]
            if interleaved:
                heads = {"q": layer.n_heads, "k": layer.n_kv_heads}.get(part, 0)
            table[name] = TensorSource(f"blk.{index}.{NAMES[part]}.{kind}", unpermute_heads=heads)
        else:
            table[name] = TensorSource(f"{OUTER[part]}.{kind}")
    return table


def keys_of(metadata: Mapping[str, Any], architecture: str) -> Keys:
    """The keys of one architecture: `llama.context_length` and so on."""
    return Keys(metadata, f"{architecture}.")
