"""config.json and GGUF metadata in all their spellings: rotary scaling, windows, head sizes, and values that are refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from astrai_runtime import part
from astrai_runtime.errors import WeightsError
from astrai_runtime.model._load import spec_of_config
from astrai_runtime.model._rope import frequencies
from astrai_runtime.model.base import DecoderSpec, RopeSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}
GEMMA = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 12, "rope_theta": 1e6, "head_dim": 16}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def spec(base: dict[str, Any] | None = None, **changes: Any) -> DecoderSpec:
    return spec_of_config({**(LLAMA if base is None else base), **changes}, {})


def rope(scaling: Any, **changes: Any) -> RopeSpec:
    return spec(rope_scaling=scaling, **changes).layers[0].rope


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_without_original": {"rope_type": "yarn", "factor": 4.0},
    "yarn_betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 0.7},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
    },
    "yarn_not_truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_l04_frequencies_and_attention_factor_equal_transformers(scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LlamaConfig(**{**LLAMA, "rope_scaling": dict(scaling)})
    theirs = LlamaRotaryEmbedding(config)
    ours, factor = frequencies(rope(scaling))
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=0.0, atol=0.0)
    assert factor == theirs.attention_scaling


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_l04_old_and_new_spellings_mean_the_same(scaling: dict[str, Any]) -> None:
    kind = scaling["rope_type"]
    others = {key: value for key, value in scaling.items() if key != "rope_type"}
    expected = rope(scaling)
    assert rope({**others, "type": kind}) == expected
    assert rope({**others, "type": "linear", "rope_type": kind}) == expected  # the newer spelling wins
    parameters = {**scaling, "rope_theta": 10000.0}
    assert spec(rope_parameters=parameters, rope_theta=None, rope_scaling=None).layers[0].rope == expected


def test_l04_no_scaling_is_plain_rotary() -> None:
    assert rope(None) == rope({"rope_type": "default"}) == RopeSpec(10000.0, 16)
    assert rope(None, rope_theta=5e5).theta == 5e5


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "dynamic", "factor": 2.0}, "type 'dynamic' is not supported; there are: default, linear, llama3, yarn"),
        ({"type": "yearn", "factor": 2.0}, "did you mean 'yarn'"),
        ({"type": "linear"}, "lacks factor"),
        ({"type": "yarn"}, "lacks factor"),
        ({"type": "linear", "factor": "two"}, "factor: 'two'; it must be a positive number"),
        ({"type": "linear", "factor": 0}, "factor: 0; it must be a positive number"),
        ({"type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "lacks low_freq_factor"),
        ({"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "greater than low_freq_factor"),
        ({"type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5; it must be 1"),
        ({"full_attention": {"rope_type": "default"}}, "differ by layer type"),
    ],
)
def test_l04_rotary_scaling_that_cannot_be_honoured_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        rope(scaling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0; it must be a positive whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3; it must be a divisor of num_attention_heads, which is 4"),
        ({"hidden_size": 66}, "num_attention_heads: 4; it must be a divisor of hidden_size"),
        ({"head_dim": 15}, "head_dim: 15; it must be even"),
        ({"hidden_act": "relu"}, "hidden_act: 'relu'; it must be one of silu"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes'; it must be true or false"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: -1; it must be a positive number"),
    ],
)
def test_odd_values_are_refused_by_key_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        spec(**changes)


def test_head_size_is_its_own_number_where_declared() -> None:
    assert spec().layers[0].head_dim == 16
    assert spec(head_dim=32).layers[0].head_dim == 32
    assert spec(head_dim=32).tensor_shapes()["layers.0.q.weight"] == (128, 64)
    assert spec({**LLAMA, "architectures": ["Qwen3ForCausalLM"]}).layers[0].head_dim == 128


def test_mistral_window_is_4096_unless_the_key_says_otherwise() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert spec(mistral).layers[0].window == 4096
    assert spec(mistral, sliding_window=7).layers[0].window == 7
    assert spec(mistral, sliding_window=None).layers[0].window is None
    assert spec(sliding_window=7).layers[0].window is None  # Llama has none


def test_qwen_slides_only_where_it_is_switched_on() -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 7, "max_window_layers": 1}
    assert [layer.window for layer in spec(qwen).layers] == [None, None]
    assert [layer.window for layer in spec(qwen, use_sliding_window=True).layers] == [None, 7]
    types = ["sliding_attention", "full_attention"]
    assert [layer.window for layer in spec(qwen, use_sliding_window=True, layer_types=types).layers] == [7, None]
    with pytest.raises(WeightsError, match="layer_types"):
        spec(qwen, use_sliding_window=True, layer_types=["full_attention"])


def test_gemma_alternates_windows_and_rotary_bases() -> None:
    old = spec(GEMMA, sliding_window=9, rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_local_base_freq=2e4)
    assert [layer.window for layer in old.layers] == ([9] * 5 + [None]) * 2
    assert old.layers[0].rope == RopeSpec(2e4, 16)
    assert old.layers[5].rope == RopeSpec(1e6, 16, "linear", (("factor", 8.0),))
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    assert spec(GEMMA, sliding_window=9, rope_parameters=parameters, rope_theta=None) == old
    assert [layer.window for layer in spec(GEMMA, sliding_window=9, sliding_window_pattern=2).layers[:2]] == [9, None]
    assert old.embedding_scale == 8.0
    assert old.layers[0].scale == 256**-0.5
    assert spec(GEMMA, sliding_window=9, query_pre_attn_scalar=64).layers[0].scale == 0.125


def test_gemma_soft_caps_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"final_logit_softcapping: 30\.0, but soft caps are not supported"):
        spec(GEMMA, final_logit_softcapping=30.0)
    assert spec(GEMMA, final_logit_softcapping=None).architecture == "gemma3"


def test_gguf_yarn_carries_its_strength_and_betas() -> None:
    metadata = {
        "qwen3.embedding_length": 64,
        "qwen3.attention.head_count": 4,
        "qwen3.feed_forward_length": 48,
        "qwen3.block_count": 1,
        "qwen3.context_length": 128,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 32,
        "qwen3.rope.scaling.attn_factor": 0.5,
        "qwen3.rope.scaling.yarn_beta_fast": 16.0,
    }
    architecture = part.load("model", "qwen3")
    numbers = dict(architecture.from_gguf(metadata, {"token_embd.weight": (300, 64)}).layers[0].rope.parameters)
    assert numbers["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * 1.3862943611))
    assert (numbers["beta_fast"], numbers["beta_slow"], numbers["original_max_position_embeddings"]) == (16.0, 1.0, 32.0)
    with pytest.raises(WeightsError, match=r"qwen3\.rope\.scaling\.type: 'longrope'; it must be one of none, linear, yarn"):
        architecture.from_gguf({**metadata, "qwen3.rope.scaling.type": "longrope"}, {"token_embd.weight": (300, 64)})
    with pytest.raises(WeightsError, match=r"qwen3\.expert_count: 8"):
        architecture.from_gguf({**metadata, "qwen3.expert_count": 8}, {"token_embd.weight": (300, 64)})


@pytest.mark.parametrize("name", part.names("model"))
def test_every_architecture_names_every_tensor_in_both_formats(name: str) -> None:
    architecture = part.load("model", name)
    for hf_class in architecture.hf_classes:
        read = spec({**GEMMA, "architectures": [hf_class], "sliding_window": 9})
        assert read.architecture == name
        for table in (architecture.hf_tensors(read), architecture.gguf_tensors(read)):
            assert set(table) == set(read.tensor_shapes())
            assert len({source.name for source in table.values()}) == len(table)


def test_no_two_architectures_claim_the_same_model() -> None:
    claims = [
        claim
        for name in part.names("model")
        for claim in (*part.load("model", name).hf_classes, *part.load("model", name).gguf_names)
    ]
    assert len(set(claims)) == len(claims)
