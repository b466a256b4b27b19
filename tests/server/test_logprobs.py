"""Log-probabilities over HTTP, beside transformers' own model of the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import live

COUNT = 4
CLOSE = {"abs": 1e-3}


@pytest.fixture(scope="module")
def http(tiny_checkpoints: Mapping[str, Path]) -> Iterator[httpx.Client]:
    choices = ("model=local", "model.name=oracle", f"model.source.path={tiny_checkpoints['llama']}")
    with (
        live.serving(*choices, "model.dtype=float32", "model.context=128") as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def oracle(tiny_checkpoints: Mapping[str, Path]) -> Any:
    """Token ids -> [T, V] log-probabilities of what comes after each."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoints["llama"], dtype=torch.float32).eval()

    def run(ids: list[int]) -> Any:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)

    return run


def greedy(oracle: Any, ids: list[int]) -> Any:
    """[COUNT, V]: the distribution of each of the next tokens."""
    tokens = list(ids)
    for _ in range(COUNT):
        tokens.append(int(oracle(tokens)[-1].argmax()))
    return oracle(tokens[:-1])[len(ids) - 1 :]


@pytest.mark.parametrize("top", [0, 1, 5])
def test_h11_completions_equal_the_reference_model(http: httpx.Client, oracle: Any, top: int) -> None:
    ids = http.post("/tokenize", json={"text": "the lantern on the bridge"}).json()["tokens"]
    asked = {"prompt": ids, "max_tokens": COUNT, "temperature": 0, "logprobs": top, "ignore_eos": True}
    told = http.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]
    rows = greedy(oracle, ids)
    assert len(told["token_logprobs"]) == COUNT
    for value, best, row in zip(told["token_logprobs"], told["top_logprobs"], rows, strict=True):
        likeliest = row.topk(max(top, 1)).values.tolist()
        assert value == pytest.approx(likeliest[0], **CLOSE)
        assert sorted(best.values(), reverse=True) == pytest.approx(likeliest, **CLOSE)


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_h11_chat_equals_the_reference_model(http: httpx.Client, oracle: Any, top: int) -> None:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "walk until morning"}]}
    ids = http.post("/tokenize", json=said).json()["tokens"]
    asked = {"max_tokens": COUNT, "temperature": 0, "logprobs": True, "top_logprobs": top, "ignore_eos": True}
    content = http.post("/v1/chat/completions", json=said | asked).json()["choices"][0]["logprobs"]["content"]
    for entry, row in zip(content, greedy(oracle, ids), strict=True):
        assert entry["logprob"] == pytest.approx(float(row.max()), **CLOSE)
        values = [one["logprob"] for one in entry["top_logprobs"]]
        assert values == pytest.approx(row.topk(top).values.tolist(), **CLOSE)
