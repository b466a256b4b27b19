"""Logits equal transformers' at every position, in one prefill and step by step, for both file formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from astrai_runtime.model._load import check_tensors, load_weights, read_spec
from astrai_runtime.weights._open import open_checkpoint
from tests.model.checkpoints import IN_GGUF, MODELS, write_gguf
from tests.model.running import TOKENS, Runner, kv_mode, load, sequence_of

CLOSE = {"rtol": 0.0, "atol": 1e-4}


@pytest.mark.parametrize("name", MODELS)
def test_l09_hf_logits_equal_transformers_at_every_position(
    name: str, folders: dict[str, Path], expected: dict[str, torch.Tensor]
) -> None:
    decoder = load(open_checkpoint(folders[name]))
    runner = Runner(decoder, kv_mode("paged", decoder.spec, page_size=4))
    torch.testing.assert_close(runner.every_position(TOKENS), expected[name], **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_one_prefill_equals_transformers(name: str, folders: dict[str, Path], expected: dict[str, torch.Tensor]) -> None:
    decoder = load(open_checkpoint(folders[name]))
    runner = Runner(decoder, kv_mode("contiguous", decoder.spec))
    for length in (1, 2, 7, 8, 33, 40):  # around the window and around the original context of the scaled ropes
        logits = runner.step((sequence := sequence_of(TOKENS[:length]), length))
        runner.kv.release(sequence)
        torch.testing.assert_close(logits[0], expected[name][length - 1], **CLOSE)


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf_logits_equal_transformers_at_every_position(
    name: str, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    decoder = load(open_checkpoint(write_gguf(name, tmp_path / "model.gguf")))
    runner = Runner(decoder, kv_mode("paged", decoder.spec, page_size=1))
    torch.testing.assert_close(runner.every_position(TOKENS), expected[name], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2"])
def test_chunked_prefill_equals_one_prefill(name: str, folders: dict[str, Path], expected: dict[str, torch.Tensor]) -> None:
    decoder = load(open_checkpoint(folders[name]))
    runner = Runner(decoder, kv_mode("paged", decoder.spec, page_size=8))
    sequence = sequence_of(TOKENS)
    for length in (5, 11, 1, 2, 21):
        logits = runner.step((sequence, length))
        torch.testing.assert_close(logits[0], expected[name][sequence.n_computed - 1], **CLOSE)


def test_bfloat16_stays_near_float32(folders: dict[str, Path], expected: dict[str, torch.Tensor]) -> None:
    for name in ("llama", "gemma3"):
        decoder = load(open_checkpoint(folders[name]), dtype=torch.bfloat16)
        runner = Runner(decoder, kv_mode("paged", decoder.spec, dtype="bfloat16"))
        logits = runner.every_position(TOKENS)
        assert logits.dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(logits, expected[name], dim=-1)
        assert cosine.min() > 0.99


def test_no_sampled_row_gives_no_logits(folders: dict[str, Path]) -> None:
    from astrai_runtime.batch import Batch, Chunk

    decoder = load(open_checkpoint(folders["llama"]))
    runner = Runner(decoder, kv_mode("paged", decoder.spec))
    sequence = sequence_of(TOKENS)
    assert runner.kv.reserve(sequence)
    assert runner.kv.extend(sequence, 6)
    batch = Batch((Chunk(sequence, 0, 6, sampled=False),))
    assert decoder(batch, runner.kv.place(batch), runner.attention).shape == (0, 300)


def test_decoder_takes_its_weights_over(folders: dict[str, Path]) -> None:
    from astrai_runtime.model._torch import TorchDecoder

    checkpoint = open_checkpoint(folders["qwen3"])
    spec, table = read_spec(checkpoint, {})
    check_tensors(checkpoint, spec, table)
    seen: list[tuple[str, int, int]] = []
    weights = load_weights(checkpoint, spec, table, torch.float32, lambda *one: seen.append(one))
    assert set(weights) == set(spec.tensor_shapes())
    assert seen[-1][1] == seen[-1][2] == 4 * spec.n_parameters()
    TorchDecoder(spec, weights, torch.float32)
    assert weights == {}
