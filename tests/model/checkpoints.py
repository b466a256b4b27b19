"""Tiny random checkpoints of every architecture, written by transformers, and the same weights as GGUF files.

transformers is imported inside the functions: most test files never need it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 300
WINDOW = 7  # tokens; smaller than the sequences of the tests, so that both masks matter
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,  # heads of 16 features, as the native kernels need them
    "intermediate_size": 80,  # no whole number of groups of 32: padding is tested with it
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

# name -> (transformers' configuration class, what differs from _SMALL)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama_llama3": ("LlamaConfig", {"rope_parameters": {**_LLAMA3, "rope_theta": 500000.0}, "head_dim": 16}),
    "llama_yarn": ("LlamaConfig", {"rope_parameters": {**_YARN, "rope_theta": 10000.0}, "head_dim": 16}),
    "llama_biases": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-4, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_biases": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 7, "query_pre_attn_scalar": 24},
    ),
}
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
# The same formulas exist in GGUF for these; `gemma3` needs the query scale that GGUF derives from the head size.
IN_GGUF = ("llama", "llama_tied", "llama_linear", "llama_llama3", "llama_yarn", "qwen2_full", "qwen3", "gemma3_gguf")
MODELS["qwen2_full"] = ("Qwen2Config", {"tie_word_embeddings": True})
MODELS["gemma3_gguf"] = ("Gemma3TextConfig", {**MODELS["gemma3"][1], "query_pre_attn_scalar": 16})

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def reference(name: str, seed: int = 0) -> Any:
    """transformers' own model of one entry of MODELS, random and in float32, every bias and norm far from neutral."""
    import torch
    import transformers

    config_class, changes = MODELS[name]
    config = getattr(transformers, config_class)(**{**_SMALL, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model.eval()


def write_hf(name: str, folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder: config.json, model.safetensors, a byte-level tokenizer of VOCAB entries, a chat template."""
    reference(name, seed).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the lantern on the bridge is lit in the evening and the keeper walks along the river until morning "
    tokenizer.train_from_iterator([text] * 4, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": 256,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


class TinyCheckpoints(Mapping[str, Path]):
    """Folders by the name of their architecture, each written when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getitem__(self, name: str) -> Path:
        if name not in ARCHITECTURES:
            raise KeyError(name)
        folder = self._root / name
        return folder if folder.exists() else write_hf(name, folder)

    def __iter__(self) -> Iterator[str]:
        return iter(ARCHITECTURES)

    def __len__(self) -> int:
        return len(ARCHITECTURES)


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(name: str, path: Path, seed: int = 0) -> Path:
    """The weights of `write_hf(name, ..., seed)` as llama.cpp's converter would write them, in float32."""
    import gguf

    model = reference(name, seed)
    config = model.config
    arch = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    else:
        _write_rope(writer, config.rope_parameters, head_dim)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if arch == "gemma3" and "norm" in key:
            values = values + np.float32(1)
        if arch == "llama" and ".q_proj." in key:
            values = _interleave(values, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in key:
            values = _interleave(values, config.num_key_value_heads)
        writer.add_tensor(_gguf_name(key, arch), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_rope(writer: Any, rope: dict[str, Any], head_dim: int) -> None:
    import gguf

    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        factors = []
        for i in range(0, head_dim, 2):
            wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - min(max(smooth, 0), 1)) / factor + min(max(smooth, 0), 1)))
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def _interleave(values: np.ndarray, heads: int) -> np.ndarray:
    return values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _gguf_name(key: str, arch: str) -> str:
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    part, kind = key.rsplit(".", 1)
    if part in outer:
        return f"{outer[part]}.{kind}"
    _, _, index, inner = part.split(".", 3)
    gemma = {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    names = {**GGUF_NAMES, **(gemma if arch == "gemma3" else {"post_attention_layernorm": "ffn_norm"})}
    return f"blk.{index}.{names[inner]}.{kind}"
