"""Loading refuses what does not fit, names it, and follows the configuration about tied heads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from astrai_runtime.errors import WeightsError
from astrai_runtime.model._load import check_tensors, read_spec, spec_of_config
from astrai_runtime.weights._open import open_checkpoint
from astrai_runtime.weights.random import RandomCheckpoint
from tests.model.checkpoints import reference, write_gguf, write_hf
from tests.model.running import Runner, kv_mode, load

TOKENS = [5, 17, 250, 9, 33, 81, 4]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def edit(tmp_path: Path, tiny_checkpoints: Mapping[str, Path]) -> Callable[..., Path]:
    """A copy of a tiny checkpoint with other tensors and other keys in config.json (None removes a key)."""

    def make(name: str, change: Callable[[Tensors], object] = lambda tensors: None, **config: Any) -> Path:
        source = tiny_checkpoints[name] if name in tiny_checkpoints else write_hf(name, tmp_path / "source")
        target = tmp_path / "edited"
        target.mkdir()
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        values = json.loads((source / "config.json").read_text())
        for key, value in config.items():
            values.pop(key, None)
            if value is not None:
                values[key] = value
        (target / "config.json").write_text(json.dumps(values))
        return target

    return make


def logits(folder: Path, overrides: Mapping[str, Any] | None = None) -> torch.Tensor:
    decoder = load(open_checkpoint(folder), overrides)
    return Runner(decoder, kv_mode("paged", decoder.spec)).every_position(TOKENS)


def expected(name: str) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = reference(name)(torch.tensor([TOKENS])).logits[0]
    return result


def test_l01_duplicate_head_beside_a_tied_one_is_harmless(edit: Callable[..., Path]) -> None:
    folder = edit("llama_tied", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    torch.testing.assert_close(logits(folder), expected("llama_tied"), rtol=0.0, atol=1e-4)


def test_l01_configuration_decides_when_a_tied_head_has_another_copy(edit: Callable[..., Path]) -> None:
    folder = edit("llama_tied", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 3}))
    torch.testing.assert_close(logits(folder), expected("llama_tied"), rtol=0.0, atol=1e-4)


def test_l01_untied_head_that_is_missing_is_named(edit: Callable[..., Path]) -> None:
    folder = edit("llama", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(WeightsError, match=r"(?s)missing: lm_head\.weight.*tie_word_embeddings: true"):
        logits(folder)


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("gemma3", True)])
def test_l01_absent_tie_key_means_the_familys_default(edit: Callable[..., Path], name: str, tied: bool) -> None:
    folder = edit(name, tie_word_embeddings=None)
    assert read_spec(open_checkpoint(folder), {})[0].tied_head is tied
    torch.testing.assert_close(logits(folder), expected(name), rtol=0.0, atol=1e-4)


def test_l02_every_missing_unexpected_and_misshapen_tensor_is_listed_at_once(edit: Callable[..., Path]) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["model.layers.0.input_layernorm.weight"]
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.0.mystery.weight"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.ones(31)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    with pytest.raises(WeightsError) as caught:
        logits(edit("llama", damage))
    message = str(caught.value)
    assert "missing: model.layers.0.input_layernorm.weight, model.layers.1.self_attn.k_proj.weight" in message
    assert "unexpected: model.layers.0.mystery.weight" in message
    assert "model.norm.weight is [31], not [64]" in message
    assert "inv_freq" not in message


def test_l02_stored_rotary_frequencies_are_ignored(edit: Callable[..., Path]) -> None:
    folder = edit("llama", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    torch.testing.assert_close(logits(folder), expected("llama"), rtol=0.0, atol=1e-4)


def test_l02_names_without_their_prefix_are_explained(edit: Callable[..., Path]) -> None:
    def strip(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    with pytest.raises(WeightsError, match=r"lack their prefix 'model\.'"):
        logits(edit("llama", strip))


@pytest.mark.parametrize("name", ["llama_biases", "qwen3_biases"])
def test_l09_biases_that_the_configuration_denies_are_errors(edit: Callable[..., Path], name: str) -> None:
    with pytest.raises(WeightsError, match=r"unexpected: .*q_proj\.bias"):
        logits(edit(name, attention_bias=False))


def test_l09_query_norms_that_the_family_lacks_are_errors(edit: Callable[..., Path]) -> None:
    with pytest.raises(WeightsError, match=r"unexpected: .*q_norm"):
        logits(edit("qwen3", architectures=["LlamaForCausalLM"]))


def test_gguf_tensor_that_nothing_uses_is_an_error(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf("qwen3", tmp_path / "model.gguf"))
    spec, table = read_spec(checkpoint, {})
    del table["layers.1.q_norm.weight"]
    table["layers.1.q_norm.weight"] = table["layers.0.q_norm.weight"]
    with pytest.raises(WeightsError, match=r"unexpected: blk\.1\.attn_q_norm\.weight"):
        check_tensors(checkpoint, spec, table)


def test_unknown_architecture_lists_the_known_ones(edit: Callable[..., Path]) -> None:
    with pytest.raises(WeightsError, match=r"'MixtralForCausalLM' is not supported; there are: .*Qwen3ForCausalLM"):
        logits(edit("llama", architectures=["MixtralForCausalLM"]))
    with pytest.raises(WeightsError, match="architectures"):
        read_spec(RandomCheckpoint({}, 0, {"vocab_size": 3}), {})


def test_override_changes_the_model_and_a_misspelt_one_is_refused(tiny_checkpoints: Mapping[str, Path]) -> None:
    folder = tiny_checkpoints["llama"]
    linear = logits(folder, {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert not torch.allclose(linear, expected("llama"), atol=1e-3)
    with pytest.raises(WeightsError, match=r"reads 'rope_scalling'; did you mean 'rope_scaling'\?"):
        logits(folder, {"rope_scalling": {"type": "linear", "factor": 2.0}})


def test_gguf_overrides_are_metadata_keys(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf("llama", tmp_path / "model.gguf"))
    assert read_spec(checkpoint, {"llama.rope.freq_base": 5e5})[0].layers[0].rope.theta == 5e5
    with pytest.raises(WeightsError, match="rope_theta"):
        read_spec(checkpoint, {"rope_theta": 5e5})


def test_random_weights_run_from_a_configuration_alone(tiny_checkpoints: Mapping[str, Path]) -> None:
    config = json.loads((tiny_checkpoints["llama"] / "config.json").read_text())
    spec = spec_of_config(config, {"num_hidden_layers": 3})
    checkpoint = RandomCheckpoint(spec.tensor_shapes(), 7, {**config, "num_hidden_layers": 3})
    decoder = load(checkpoint)
    assert decoder.spec == spec
    assert Runner(decoder, kv_mode("paged", spec)).every_position(TOKENS).shape == (7, 300)
