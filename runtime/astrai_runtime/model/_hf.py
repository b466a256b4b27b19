"""What the families share in config.json and in the tensor names of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astrai_runtime.model._keys import Keys
from astrai_runtime.model._sizes import Activation, Sizes
from astrai_runtime.model.base import DecoderSpec, TensorSource

# Names that transformers gives to one and the same function.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
NAMES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
OUTER = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


def sizes(
    config: Mapping[str, Any], *, activation_key: str = "hidden_act", head_dim: int | None = None, tied_head: bool = False
) -> Sizes:
    """Reads them, refusing what no family here supports. `head_dim`, `tied_head`: the family's defaults.

    Without a default the head size is hidden size / heads.
    """
    keys = Keys(config)
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    kv_heads = keys.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise keys.wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, which is {heads}")
    if head_dim is None and not keys.get("head_dim") and hidden % heads:
        raise keys.wrong("num_attention_heads", heads, f"a divisor of hidden_size, which is {hidden}, without a head_dim")
    size = keys.count("head_dim", head_dim or hidden // heads)
    if size % 2:
        raise keys.wrong("head_dim", size, "even: rotary embedding turns pairs")
    name = keys.word(activation_key, "silu" if activation_key == "hidden_act" else "gelu_pytorch_tanh")
    if name not in ACTIVATIONS:
        raise keys.wrong(activation_key, name, f"one of {', '.join(ACTIVATIONS)}")
    return Sizes(
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.count("intermediate_size"),
        n_layers=keys.count("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=size,
        context=keys.count("max_position_embeddings"),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[name],
        tied_head=keys.flag("tie_word_embeddings", tied_head),
    )


def windows(config: Mapping[str, Any], n_layers: int, window: int | None, sliding: list[bool]) -> list[int | None]:
    """Each layer's window: `layer_types` where config.json has them, otherwise the family's own rule `sliding`."""
    keys = Keys(config)
    types = keys.get("layer_types")
    if types is not None:
        if len(types) != n_layers or not set(types) <= {"full_attention", "sliding_attention"}:
            raise keys.wrong("layer_types", types, f"{n_layers} times 'full_attention' or 'sliding_attention'")
        sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding) and window is None:
        raise keys.wrong("sliding_window", None, "a number of tokens, because some layers slide")
    return [window if slides else None for slides in sliding]


def qwen_windows(config: Mapping[str, Any], n_layers: int) -> list[int | None]:
    """Qwen's rule: with `use_sliding_window` the layers from `max_window_layers` on slide."""
    keys = Keys(config)
    window = keys.count("sliding_window", 4096) if keys.flag("use_sliding_window", False) else None
    if window is None:
        return [None] * n_layers
    first = keys.get("max_window_layers")
    first = 28 if first is None else int(first)
    return windows(config, n_layers, window, [i >= first for i in range(n_layers)])


def tensor_names(spec: DecoderSpec, changed: Mapping[str, str] | None = None) -> dict[str, TensorSource]:
    """Canonical name -> tensor of the checkpoint. `changed`: a family's own names inside a layer."""
    inner = {**NAMES, **(changed or {})}
    table = {}
    for name in spec.tensor_shapes():
        part, kind = name.rsplit(".", 1)
        if part.startswith("layers."):
            _, index, part = part.split(".")
            table[name] = TensorSource(f"model.layers.{index}.{inner[part]}.{kind}")
        else:
            table[name] = TensorSource(f"{OUTER[part]}.{kind}")
    return table
