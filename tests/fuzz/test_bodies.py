"""Bodies of every route, from its own schema and from worse imaginations: no server error, no hang, still alive."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st

from .conftest import BODY_BYTES, check, few, fewer

Json = Any
WORDS = ("user", "assistant", "system", "tool", "developer", "text", "function", "auto", "none", "json_object", "", "a")
NUMBERS = (0, -1, 1, 2, 64, 128, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e-9, 1e308, 2.0)
scalars = (
    st.none()
    | st.booleans()
    | st.sampled_from(NUMBERS)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS)
    | st.text(max_size=20)
)
names = st.sampled_from(WORDS) | st.text(max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
parts = st.fixed_dictionaries({"type": st.sampled_from(("text", "image_url", "tool_use", "x"))}, optional={"text": anything})
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(WORDS),
            "content": st.text(max_size=30) | st.lists(parts | anything, max_size=3) | anything,
        },
        optional={"name": anything, "tool_calls": anything, "tool_call_id": anything},
    )
    | anything,
    max_size=4,
)


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def posts(document: dict[str, Any]) -> list[str]:
    return [path for path, methods in document["paths"].items() if "post" in methods]


def fields(document: dict[str, Any], path: str) -> dict[str, Any]:
    """Field -> its schema, of a route's body."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema.get("$ref", "").rsplit("/", 1)[-1]
    found: dict[str, Any] = document["components"]["schemas"].get(name, schema).get("properties", {})
    return found


def test_every_route_survives_what_its_own_schema_allows_and_forbids(
    url: str, http: httpx.Client, document: dict[str, Any]
) -> None:
    tried = set()
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        tried.add(operation.path)
        for mode in schemathesis.GenerationMode if operation.body else [schemathesis.GenerationMode.POSITIVE]:

            @fewer
            @given(operation.as_strategy(generation_mode=mode))
            def run(case: Any) -> None:
                asked = case.as_transport_kwargs(base_url=url)
                sent = {key: asked[key] for key in ("method", "url", "params", "json") if asked.get(key) is not None}
                check(http.request(**sent, content=asked.get("data"), headers=dict(asked["headers"])))

            run()
    assert tried == set(document["paths"])
    http.patch("/admin/scheduler", json={"max_prompt_tokens_per_tick": 256})  # it may have been fuzzed down to 1


def test_every_field_survives_every_kind_of_value(http: httpx.Client, document: dict[str, Any]) -> None:
    for path in posts(document):
        known = sorted(fields(document, path))
        odd = st.dictionaries(st.sampled_from([*known, "temprature", ""]), anything, max_size=4)
        good = good_body(known)

        @few
        @given(st.just((path, good)), odd, messages, st.booleans())
        def run(at: tuple[str, dict[str, Any]], body: dict[str, Any], said: list[Any], stream: bool) -> None:
            route, base = at
            talk = {"messages": said} if "messages" in base else {}
            check(http.post(route, json={**base, **talk, "stream": stream, **body}))

        run()


def test_one_odd_field_in_a_good_body_is_answered(http: httpx.Client, document: dict[str, Any]) -> None:
    """Everything but one field is right, so that the odd one is really looked at."""
    for path in posts(document):
        known = sorted(fields(document, path))

        @few
        @given(st.just((path, good_body(known))), st.sampled_from(known), anything)
        def run(at: tuple[str, dict[str, Any]], name: str, value: Any) -> None:
            route, good = at
            check(http.post(route, json={**good, name: value}))

        run()


def good_body(known: list[str]) -> dict[str, Any]:
    """A body that a route with these fields answers."""
    values = {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a", "tokens": [65]}
    return {name: values[name] for name in known if name in values}


def deep(levels: int, opened: str, closed: str) -> bytes:
    return (opened * levels + "1" + closed * levels).encode()


ODD_JSON = {
    "nothing": b"",
    "a space": b" ",
    "no JSON": b"{",
    "a number": b"1",
    "a list": b"[]",
    "null": b"null",
    "NaN": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "Infinity": b'{"messages": [{"role": "user", "content": "x"}], "temperature": -Infinity}',
    "a number beyond a double": b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    "a number of many digits": b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}",
    "a fraction of many digits": b'{"messages": [{"role": "user", "content": "x"}], "temperature": 0.' + b"1" * 5000 + b"}",
    "a key twice": b'{"messages": [], "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "max_tokens": 2}',
    "no UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "UTF-16": '{"messages": []}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "an overlong form": b'{"messages": [{"role": "user", "content": "\xc0\xaf"}]}',
    "half a surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "a zero character": b'{"messages": [{"role": "user", "content": "\\u0000"}]}',
    "deep lists": deep(4000, "[", "]"),
    "deep objects": deep(3000, '{"a":', "}"),
    "deep and never closed": b"[" * 15_000,
    "a deep content": b'{"messages": [{"role": "user", "content": ' + deep(500, "[", "]") + b"}]}",
    "many keys": json.dumps({f"k{number}": 0 for number in range(1000)}).encode(),
    "many messages": json.dumps({"messages": [{"role": "user", "content": ""}] * 500}).encode(),
    "zeros": b"\0" * 1000,
}


@pytest.mark.parametrize("name", ODD_JSON)
def test_odd_json_is_answered(http: httpx.Client, document: dict[str, Any], name: str) -> None:
    for path in posts(document):
        for kind in (
            "application/json",
            "text/plain",
            "application/x-www-form-urlencoded",
            "application/json; charset=utf-16",
        ):
            check(http.post(path, content=ODD_JSON[name], headers={"content-type": kind}))


def test_a_body_of_any_bytes_is_answered(http: httpx.Client, document: dict[str, Any]) -> None:
    seed = json.dumps({"messages": [{"role": "user", "content": "\u00e9\U0001f600"}], "max_tokens": 2}).encode()
    mutated = st.builds(
        lambda at, data, drop: seed[:at] + data + seed[at + drop :],
        st.integers(0, len(seed)),
        st.binary(max_size=6),
        st.integers(0, 8),
    )
    for path in posts(document):

        @few
        @given(st.just(path), st.binary(max_size=200) | mutated)
        def run(route: str, body: bytes) -> None:
            check(http.post(route, content=body, headers={"content-type": "application/json"}))

        run()


def test_a_body_one_byte_too_large_is_413_and_one_at_the_limit_is_read(http: httpx.Client, document: dict[str, Any]) -> None:
    for path in posts(document):
        whole = json.dumps({"messages": [{"role": "user", "content": ""}], "model": ""}).encode()
        at_limit = whole + b" " * (BODY_BYTES - len(whole))
        assert http.post(path, content=at_limit).status_code != 413
        assert http.post(path, content=at_limit + b" ").status_code == 413


def test_any_path_and_method_is_answered(http: httpx.Client) -> None:
    odd = st.binary(max_size=30).map(quote) | st.text(st.characters(categories=("L", "N", "P", "S")), max_size=20).map(quote)
    paths = odd | st.builds("v1/models/{}".format, odd) | st.builds("v1/{}".format, odd)

    @few
    @given(paths, st.sampled_from(("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD", "TRACE", "BREW")))
    def run(path: str, method: str) -> None:
        check(http.request(method, f"/{path.lstrip('/')}"))

    run()
