"""Concurrent sequences never receive pieces of each other: every answer is the one it gives alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from astrai_runtime import part
from astrai_runtime.sequence import Sequence
from astrai_runtime.weights._open import open_checkpoint
from tests.model.running import Runner, kv_mode, load, sequence_of

N_NEW = 6


@pytest.mark.parametrize("kind", part.names("kv"))
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_k09_jittered_neighbours_answer_as_they_do_alone(
    kind: str, architecture: str, seed: int, tiny_checkpoints: Mapping[str, Path]
) -> None:
    chance = random.Random(seed)
    decoder = load(open_checkpoint(tiny_checkpoints[architecture]))
    prompts = [[3 + n, *(chance.randrange(3, 300) for _ in range(chance.randrange(50)))] for n in range(16)]
    alone = Runner(decoder, kv_mode("contiguous", decoder.spec, rows=1, context=64))
    expected = [alone.greedy(prompt, N_NEW) for prompt in prompts]

    options = {"page_size": 4} if kind == "paged" else {}
    together = Runner(decoder, kv_mode(kind, decoder.spec, rows=7, context=64, **options))
    waiting = [sequence_of(prompt) for prompt in prompts]
    everyone, running = list(waiting), list[Sequence]()
    while waiting or running:
        while waiting and len(running) < 7 and (not running or chance.random() < 0.6):
            running.append(waiting.pop(0))
        chosen = [sequence for sequence in running if chance.random() < 0.8] or running[:1]
        logits = together.step(*((one, chance.randint(1, one.n_uncomputed)) for one in chosen))
        for row, sequence in zip(logits, chosen, strict=True):
            if sequence.n_uncomputed == 0:
                sequence.tokens.append(int(row.argmax()))
            if sequence.n_generated == N_NEW:
                together.kv.release(sequence)
                running.remove(sequence)
        together.kv.check_integrity(one for one in running if one.row is not None)
    assert [sequence.tokens[sequence.n_prompt :] for sequence in everyone] == expected
