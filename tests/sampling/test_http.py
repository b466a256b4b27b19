"""Sampling fields over HTTP on the shipped pipeline: what is honoured, what is refused by name, and strict JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests import live

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with live.serving("sampling.logprobs_mode=filtered") as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def ask(http: httpx.Client, **fields: Any) -> str:
    answer = http.post(CHAT, json=BODY | fields)
    assert answer.status_code == 200, answer.text
    text: str = strict(answer.text)["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize(
    "fields",
    [
        *({"top_k": k} for k in (-1, 0, 1, 257, 258, 259, 10**9)),
        *({"top_p": p} for p in (0, 1e-9, 0.5, 1.0, None)),
        *({"temperature": t} for t in (0, 1e-8, 1e-4, 2, None)),
        *({"min_p": 1}, {"typical_p": 0}, {"typical_p": 0.3}, {"mirostat": 0}),
        {"mirostat": 2, "mirostat_tau": 3.5, "mirostat_eta": 0.2, "top_k": 0},
        *({"logit_bias": {"5": 100}}, {"logit_bias": {}}, {"presence_penalty": -2, "frequency_penalty": 2}),
    ],
)
def test_s01_s02_s03_values_at_the_borders_are_answered(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert ask(http, **fields) == ask(http, **fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *(({"top_k": k}, "top_k") for k in (-2, 2**63, 1.5, "5")),
        *(({"top_p": p}, "top_p") for p in (1.0000001, -0.1, "x")),
        *(({"temperature": t}, "temperature") for t in (2.1, -1, "hot")),
        *(({"logit_bias": {key: 1}}, "logit_bias") for key in ("-1", "258", "999999", "abc", " 5 ")),
        *(({"logit_bias": {"5": value}}, "logit_bias") for value in (101, "x", None)),
        ({"logit_bias": {str(token): 1 for token in range(5000)}}, "logit_bias"),
        *(({"mirostat": 1}, "mirostat"), ({"typical_p": 1.1}, "typical_p"), ({"mirostat_tau": -1}, "mirostat_tau")),
    ],
)
def test_s01_s02_s03_s05_what_cannot_be_honoured_is_a_400_that_names_it(
    http: httpx.Client, fields: dict[str, Any], named: str
) -> None:
    answer = http.post(CHAT, json=BODY | fields)
    assert answer.status_code == 400
    error = strict(answer.text)["error"]
    assert error["type"] == "invalid_request_error"
    assert named in f"{error['param']} {error['message']}"


def test_s05_refusals_do_not_disturb_a_running_answer(http: httpx.Client) -> None:
    alone = ask(http, max_tokens=200)
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(ask, http, max_tokens=200)
        refused = [http.post(CHAT, json=BODY | {"logit_bias": {"258": 1}}).status_code for _ in range(20)]
        assert running.result() == alone
    assert set(refused) == {400}
    assert http.get("/health").status_code == 200


def test_s08_one_requests_settings_are_not_another_ones(http: httpx.Client) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "top_k": 2},
        {"logit_bias": {"65": 100}},
        {"temperature": 1, "presence_penalty": 2, "frequency_penalty": 1, "repetition_penalty": 1.5},
        {"typical_p": 0.5},
        {"mirostat": 2, "mirostat_tau": 2, "top_k": 0},
    ]
    alone = [ask(http, max_tokens=40, **fields) for fields in kinds]
    with ThreadPoolExecutor(len(kinds)) as pool:
        assert list(pool.map(lambda fields: ask(http, max_tokens=40, **fields), kinds)) == alone
    assert alone[2] == "A" * 40


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 1}, {"temperature": 0}, {"logit_bias": {str(token): -100 for token in range(250)}}, {"top_p": 0}, {}],
)
def test_s10_log_probabilities_are_strict_json_and_those_of_the_draw(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = http.post(CHAT, json=BODY | fields | {"logprobs": True, "top_logprobs": 5})
    content = strict(answer.text)["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for entry in content:
        values = [one["logprob"] for one in entry["top_logprobs"]]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert min(values) >= -9999.0
        assert sum(map(math.exp, values)) <= 1 + 1e-6
        if fields in ({"top_k": 1}, {"temperature": 0}, {"top_p": 0}):
            assert (entry["logprob"], values[1]) == (0.0, -9999.0)
