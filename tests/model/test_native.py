"""The native program against the torch interpreter, and against itself: bit for bit the same whatever is beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from astrai_runtime.errors import KernelError
from astrai_runtime.kernels.base import FORMATS, Format, Isa
from astrai_runtime.kernels.cpu import Library
from astrai_runtime.model._native import NativeDecoder
from astrai_runtime.sequence import Sequence
from astrai_runtime.weights._open import open_checkpoint
from tests.model.checkpoints import IN_GGUF, MODELS, write_gguf, write_hf
from tests.model.native import NativeRunner, load_native, stale
from tests.model.running import TOKENS, Runner, kv_mode, load, sequence_of

# Root mean square of the logits' difference from float32, over that of the logits: what each precision may cost on random
# weights, which are harder than trained ones. Measured at most: 6.4e-7, 0.012, 0.039, 0.29.
BOUNDS: dict[Format, float] = {"float32": 2e-6, "bfloat16": 0.02, "int8": 0.05, "int4": 0.35}


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).pow(2).mean().sqrt() / right.pow(2).mean().sqrt())


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_stay_within_the_bounds_of_each_precision(
    name: str, weights: Format, library: Library, folders: dict[str, Path], expected: dict[str, torch.Tensor]
) -> None:
    decoder = load_native(library, folders[name], weights)
    runner = NativeRunner(decoder, "paged", weights, page_size=4)
    assert error(runner.every_position(TOKENS), expected[name]) < BOUNDS[weights]
    decoder.close()


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", ["llama_biases", "qwen2", "gemma3"])
def test_every_instruction_set_computes_the_model(
    name: str, weights: Format, isa: Isa, library: Library, folders: dict[str, Path], expected: dict[str, torch.Tensor]
) -> None:
    decoder = load_native(library, folders[name], weights, isa=isa)
    runner = NativeRunner(decoder, "contiguous", weights)
    for length in (1, 2, 7, 33):
        logits = runner.step((sequence := sequence_of(TOKENS[:length]), length))
        runner.kv.release(sequence)
        assert error(logits[0], expected[name][length - 1]) < 2 * BOUNDS[weights]
    decoder.close()


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf_files_give_the_same_logits(
    name: str, library: Library, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    decoder = load_native(library, write_gguf(name, tmp_path / "model.gguf"))
    runner = NativeRunner(decoder, "paged", "float32", page_size=1)
    assert error(runner.every_position(TOKENS), expected[name]) < BOUNDS["float32"]
    decoder.close()


def test_float32_equals_the_torch_interpreter_in_mixed_batches(library: Library, folders: dict[str, Path]) -> None:
    for name in ("llama", "gemma3"):
        native = load_native(library, folders[name])
        torch_native = load(open_checkpoint(folders[name]))
        both = (
            NativeRunner(native, "paged", "float32", page_size=4),
            Runner(torch_native, kv_mode("paged", torch_native.spec, page_size=4)),
        )
        rows = []
        for runner in both:
            sequences = [sequence_of(TOKENS[i:]) for i in range(3)]
            runner.step((sequences[0], 20), (sequences[1], 3))
            rows.append(runner.step((sequences[0], 1), (sequences[1], 17), (sequences[2], 9)))
        torch.testing.assert_close(rows[0], rows[1], rtol=0.0, atol=1e-4)
        native.close()


class Schedule:
    """One way to compute some sequences: who shares a step with whom, and in which chunks."""

    def __init__(self, seed: int, runner: NativeRunner, prompts: list[list[int]]) -> None:
        self._random = random.Random(seed)
        self._runner = runner
        self._prompts = prompts

    def logits(self) -> dict[tuple[int, int], torch.Tensor]:
        """(sequence, position) -> the logits there, wherever a chunk happened to end."""
        waiting = [(number, sequence_of(tokens)) for number, tokens in enumerate(self._prompts)]
        self._random.shuffle(waiting)
        running: list[tuple[int, Sequence]] = []
        found: dict[tuple[int, int], torch.Tensor] = {}
        while waiting or running:
            while waiting and len(running) < 4 and (not running or self._random.random() < 0.5):
                number, sequence = waiting.pop()
                assert self._runner.kv.reserve(sequence)  # now, because it may find some of its tokens computed
                running.append((number, sequence))
            step = [each for each in running if self._random.random() < 0.7] or running[:1]
            chunks = [(sequence, self._random.choice([1, 1, 2, 5, 40])) for _, sequence in step]
            chunks = [(sequence, min(length, len(sequence.tokens) - sequence.n_computed)) for sequence, length in chunks]
            rows = self._runner.step(*chunks)
            for (number, sequence), row in zip(step, rows, strict=True):
                found[number, sequence.n_computed - 1] = row
                if sequence.n_computed == len(sequence.tokens):
                    self._runner.kv.release(sequence)
                    running.remove((number, sequence))
        return found


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "mistral"])
def test_logits_are_the_same_bits_in_every_schedule(
    name: str, weights: Format, isa: Isa, library: Library, folders: dict[str, Path]
) -> None:
    prompts = [[3 + (17 * i + 31 * length) % 290 for i in range(length)] for length in (1, 16, 17, 33, 150)]
    alone = load_native(library, folders[name], weights, isa=isa, threads=1)
    runner = NativeRunner(alone, "contiguous", weights)
    right = {
        (number, position): row
        for number, tokens in enumerate(prompts)
        for position, row in enumerate(runner.every_position(tokens))
    }
    alone.close()
    ways: list[tuple[str, dict[str, object]]] = [
        ("contiguous", {"context": 167}),  # rows that do not begin at a block
        ("paged", {"page_size": 1}),
        ("paged", {"page_size": 4, "prefix_cache": False}),
        ("paged", {"page_size": 16}),
        ("paged", {"page_size": 32}),
    ]
    for seed, (kind, options) in enumerate(ways):
        decoder = load_native(library, folders[name], weights, isa=isa, threads=1 + seed % 3)
        runner = NativeRunner(decoder, kind, weights, **options)
        stale(runner.kv)
        for again in range(2):  # the second time some beginnings are cached
            for at, row in Schedule(seed + 10 * again, runner, prompts).logits().items():
                assert torch.equal(row, right[at]), (kind, options, at)
        decoder.close()


@pytest.fixture
def decoder(library: Library, folders: dict[str, Path]) -> Iterator[NativeDecoder]:
    opened = load_native(library, folders["llama"])
    yield opened
    opened.close()


def test_token_outside_the_vocabulary_is_refused_and_changes_nothing(decoder: NativeDecoder) -> None:
    runner = NativeRunner(decoder, "paged", "float32", page_size=4)
    with pytest.raises(KernelError, match="token id 300 is outside the vocabulary of 300"):
        runner.step((sequence_of([3, 300, 4]), 3))
    right = NativeRunner(decoder, "paged", "float32", page_size=4).every_position(TOKENS[:5])
    assert torch.equal(runner.every_position(TOKENS[:5]), right)


def test_step_without_sampled_rows_writes_keys_and_values_all_the_same(decoder: NativeDecoder) -> None:
    from astrai_runtime.batch import Batch, Chunk

    right = NativeRunner(decoder, "paged", "float32", page_size=4).every_position(TOKENS)[-1]
    runner = NativeRunner(decoder, "paged", "float32", page_size=4)
    sequence = sequence_of(TOKENS)
    assert runner.kv.reserve(sequence)
    assert runner.kv.extend(sequence, 39)
    batch = Batch((Chunk(sequence, 0, 39, sampled=False),))
    assert decoder(batch, runner.kv.place(batch), runner.attention).shape == (0, 300)
    sequence.n_computed = 39
    assert torch.equal(runner.step((sequence, 1))[0], right)


def test_damaged_sequence_does_not_reach_its_neighbours(library: Library, tmp_path: Path) -> None:
    folder = write_hf("llama", tmp_path / "damaged")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][299] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for weights in FORMATS:
        decoder = load_native(library, folder, weights)
        runner = NativeRunner(decoder, "paged", weights, page_size=4, prefix_cache=False)
        healthy = [token % 290 for token in TOKENS[:20]]
        right = runner.every_position(healthy)[-1]
        rows = runner.step((bad := sequence_of([5, 299, 6]), 3), (sequence_of(healthy), 20))
        assert rows[0].isnan().all()
        assert torch.equal(rows[1], right)
        runner.kv.release(bad, keep=False)
        assert torch.equal(runner.every_position(healthy)[-1], right)  # on pages that the damaged one left behind
        decoder.close()


def test_steady_state_takes_no_more_memory(library: Library, folders: dict[str, Path]) -> None:
    decoder = load_native(library, folders["gemma3"], "int8", max_tokens=64)
    runner = NativeRunner(decoder, "paged", "int8", page_size=16)
    sequences = [sequence_of(TOKENS) for _ in range(2)]
    runner.step(*((sequence, 32) for sequence in sequences))
    held = decoder.scratch_bytes()
    for _ in range(8):
        runner.step(*((sequence, 1) for sequence in sequences))
    assert decoder.scratch_bytes() == held
    decoder.close()
