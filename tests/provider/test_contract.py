"""What every provider has in common: closed configurations, complete tables, and honest words about what is missing."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from astrai_runtime import part
from astrai_runtime.errors import UnknownPart, Unsupported
from astrai_runtime.event import Event, Finished, Usage
from astrai_runtime.provider.base import ModelInfo, Provider, ProviderPart, TextProvider, Vectors, operation
from astrai_runtime.request import Prompt
from astrai_runtime.text._bytes import byte_tokenizer
from tests.provider.reading import ReadingProvider, make_kv

INFO = ModelInfo("m", "none", 0, 258, 64, 0)


async def complete(prompt: Prompt) -> AsyncGenerator[Event, None]:
    yield Finished("stop", Usage())


def logits_table(**changes: Any) -> Provider:
    reader = ReadingProvider(make_kv())
    required = {
        "info": INFO,
        "tokenizer": byte_tokenizer(),
        "chat_template": None,
        "kv": reader.kv,
        "run": reader.run,
        "close": reader.close,
    }
    return Provider(**required | changes)


def test_every_provider_says_what_it_needs_and_how_it_answers() -> None:
    assert set(part.names("provider")) >= {"local", "mock", "remote"}
    found = {name: part.load("provider", name) for name in part.names("provider")}
    assert all(issubclass(cls, ProviderPart) for cls in found.values())
    assert [name for name, cls in found.items() if cls.needs_weights] == ["local"]
    assert {name: found[name].answers for name in ("local", "mock", "remote")} == {
        "local": "logits",
        "mock": "logits",
        "remote": "text",
    }


def test_unknown_provider_is_an_error_that_lists_those_that_exist() -> None:
    with pytest.raises(UnknownPart, match="no provider named 'cpu'; there are: local, mock, remote"):
        part.load("provider", "cpu")


@pytest.mark.parametrize("missing", ["info", "tokenizer", "kv", "run", "close"])
def test_logits_table_lacks_no_required_operation(missing: str) -> None:
    with pytest.raises(Unsupported, match=f"a Provider needs {missing}"):
        logits_table(**{missing: None})


@pytest.mark.parametrize("missing", ["info", "complete", "close"])
def test_text_table_lacks_no_required_operation(missing: str) -> None:
    required: dict[str, Any] = {"info": INFO, "complete": complete, "close": lambda: None}
    with pytest.raises(Unsupported, match=f"a TextProvider needs {missing}"):
        TextProvider(**required | {missing: None})


def test_optional_operation_is_there_or_unsupported_with_a_list() -> None:
    plain = logits_table()
    assert plain.capabilities == {"logits", "tokenize"}
    with pytest.raises(Unsupported, match="the provider of model 'm' cannot 'embed'; it can: logits, tokenize"):
        operation(plain, "embed")
    with pytest.raises(Unsupported, match="cannot 'dance'"):
        operation(plain, "dance")
    able = logits_table(embed=lambda texts: Vectors(((1.0,),) * len(texts), 1))
    assert able.capabilities == {"logits", "tokenize", "embed"}
    assert operation(able, "embed")(["a", "b"]).rows == ((1.0,), (1.0,))
