"""Cases that users of other systems ran into: each is the name of a test here, or there is a reason why it cannot be yet.

A test covers a case when its name says so: `test_h01_...`. More cases of the same kinds exist than are listed: what is
mended is the kind.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

CASES = {
    # the HTTP API
    "h01": "usage of a stream: one chunk, at its end, only when asked for",
    "h02": "every chunk is complete: id, created, model, choices",
    "h03": "an Anthropic stream ends with message_stop, in the right order, without [DONE]",
    "h06": "counting tokens accepts what asking accepts, and agrees with it",
    "h07": "empty, null or missing messages are a 400 before any stream",
    "h08": "content as text parts means what the string means",
    "h09": "an assistant turn with tool calls and no content",
    "h10": "n choices: distinct when sampled, prompt counted once",
    "h11": "log-probabilities: shape, bytes, limits, values",
    "h12": "token limits of 0, 1, 2, negative, fractional, null",
    "h13": "prompts at and beyond the context",
    "h14": "exactly one finish reason a choice",
    "h15": "no byte of a stop string is shown, wherever tokens cut it",
    "h18": "embeddings in base64 and float: not offered, and the route says so",
    "h19": "unsupported and misspelt fields are told; both names of the token limit",
    "h20": "a trailing assistant turn as a prefill",
    "h21": "empty stop strings",
    "h22": "the system prompt as blocks; developer and system roles",
    # text
    "t01": "characters of several tokens arrive whole",
    "t03": "a limit inside a character; stray continuation bytes",
    "t04": "one beginning mark, not two",
    "t06": "every end token ends",
    "t08": "errors inside a chat template are the request's, as 400",
    # KV and prefix cache
    "k01": "answers from the cache equal answers without it",
    "k02": "equal hashes of different prefixes share nothing",
    "k05": "the pool's accounting survives every kind of ending",
    "k06": "a preempted request goes on as if it had not been",
    "k07": "what can never fit is refused at once and blocks nobody",
    "k09": "requests that run together do not mix",
    "k10": "the end of the context ends an answer",
    # sampling
    "s01": "top_k and top log-probabilities beyond the vocabulary",
    "s02": "top_p at its borders",
    "s03": "temperature 0 and tiny",
    "s05": "ids out of range in logit_bias and stops",
    "s08": "greedy and sampled rows in one batch",
    "s09": "padding rows of the output matrix are never sampled",
    "s10": "no infinity and no NaN in JSON",
    # reliability and security
    "r01": "a client that left frees its place",
    "r02": "nothing is left behind after a thousand requests",
    "r03": "overload is refused in a way that clients can retry",
    "r04": "a slow reader slows nobody else and loses nothing",
    "r06": "a termination signal drains, and a second one ends",
    "r08": "names in requests reach nothing outside",
    "r09": "no address in a request is ever fetched",
    "r12": "a chat template cannot run code",
    "r13": "adapters that come and go under traffic",
    "r14": "stores for follow-up look-ups are bounded",
    # models' files
    "l01": "tied and untied heads",
    "l02": "missing, misshapen and unknown tensors",
    "l03": "shard names cannot lead out of the folder",
    "l04": "rotary scaling in all its spellings",
    "l06": "broken safetensors files",
    "l07": "broken GGUF files",
    "l09": "biases, query norms, head sizes",
    "l10": "pickles are never opened",
    "l12": "GGUF pre-tokenizer tags",
    "l13": "casts that overflow are told",
    # configuration
    "f01": "misspelt keys",
    "f02": "numbers that are text and text that is a number",
    "f04": "what cannot be resolved is told before anything loads",
    "f05": "sizes that do not divide, switches that contradict",
    "f06": "memory is checked before it is taken",
}

NOT_YET = {
    "r13": "no adapters: a model is what its files say",
    "r14": "nothing of an answered request is kept: no stores, no sessions",
}


@pytest.fixture(scope="module")
def covered() -> set[str]:
    """Case ids in the names of test functions and methods."""
    names = (
        node.name
        for file in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    found = (re.match(r"test_((?:[a-z]\d\d_)+)", name) for name in names)
    return {case for match in found if match for case in match[1].rstrip("_").split("_")}


def test_every_case_has_a_test_or_a_reason(covered: set[str]) -> None:
    missing = {case: title for case, title in CASES.items() if case not in covered and case not in NOT_YET}
    assert not missing


def test_no_reason_outlives_its_need(covered: set[str]) -> None:
    assert not covered & set(NOT_YET)


def test_no_test_claims_a_case_that_is_not_listed(covered: set[str]) -> None:
    """Cases of agents, structured output and tool calls belong to later steps and are not listed here."""
    assert {case for case in covered if case[0] in "htksrlf"} <= set(CASES)
