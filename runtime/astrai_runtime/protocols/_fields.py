"""Fields that several protocols share: text or text parts, stop strings, and what happens to fields an API does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from astrai_runtime.errors import InvalidRequest, ModelNotFound, UnknownField, Unsupported, did_you_mean
from astrai_runtime.protocols._errors import pointer_of, shown
from astrai_runtime.protocols.base import Served

MAX_STOPS = 16
MAX_STOP_CHARS = 1024


class Body(BaseModel):
    """A request body. Numbers are not made from strings. Fields it does not name are kept for `refuse_fields`."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class Strict(BaseModel):
    """A part of a body whose fields are all named."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(BaseModel):
    """One part of a message. Only `text` is served; other types are read so that the refusal can name them."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: str
    text: str | None = None


def _string_or_list(value: Any) -> str | None:
    return "(string)" if isinstance(value, str) else "(list)" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("(string)")] | Annotated[list[TextPart], Tag("(list)")],
    Discriminator(
        _string_or_list,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]
Stops = Annotated[
    Annotated[str, Tag("(string)")] | Annotated[list[str], Tag("(list)")],
    Discriminator(
        _string_or_list,
        custom_error_type="stop_type",
        custom_error_message="Input should be a string or a list of strings",
    ),
]


def read_text(content: str | list[TextPart] | None, place: str) -> str:
    """The text of a message: parts are joined with nothing between them; no content is no text.

    Raises:
        InvalidRequest: a part of another type than `text`; `place` is the content's JSON pointer.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for index, piece in enumerate(content):
        if piece.type != "text":
            raise InvalidRequest(
                f"a content part of type '{shown(piece.type)}' is not supported by this deployment; send 'text' parts",
                param=f"{place}/{index}/type",
            )
        if piece.text is None:
            raise InvalidRequest("a content part of type 'text' needs a text", param=f"{place}/{index}/text")
    return "".join(piece.text or "" for piece in content)


def read_stops(stops: str | list[str] | None, place: str) -> tuple[str, ...]:
    """Stop strings, each once and in their order.

    Raises:
        InvalidRequest: an empty string, one over 1024 characters, or more than 16.
    """
    given = [] if stops is None else [stops] if isinstance(stops, str) else stops
    if len(given) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings, not {len(given)}", param=place)
    for index, stop in enumerate(given):
        at = place if isinstance(stops, str) else f"{place}/{index}"
        if not stop:
            raise InvalidRequest("a stop string may not be empty: it would end every reply at once; leave it out", param=at)
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidRequest(f"a stop string holds at most {MAX_STOP_CHARS} characters, not {len(stop)}", param=at)
    return tuple(dict.fromkeys(given))


def check_model(name: str | None, served: Served) -> None:
    """Accepts the served model's name, or none.

    Raises:
        ModelNotFound: another name; the message lists what is served.
    """
    if name is not None and name != served.model.name:
        raise ModelNotFound(f"no model named '{shown(name)}'; this deployment serves: {served.model.name}", param="/model")


def refuse_fields(body: Body, unsupported: Mapping[str, tuple[Any, ...]], served: Served) -> dict[str, Any]:
    """Decides on the fields that the body's class does not name; returns those that are knobs of the declared pipeline.

    `unsupported` maps fields of the public API that cannot be honoured to the values that ask for nothing; null is
    always one of them.

    Raises:
        Unsupported: such a field with any other value. UnknownField: a field that this API does not have.
    """
    knobs = {knob.name for knob in served.knobs}
    extra = body.model_extra or {}
    for name, value in extra.items():
        if name in knobs or (name in unsupported and (value is None or value in unsupported[name])):
            continue
        if name in unsupported:
            raise Unsupported(f"'{name}' is not supported by this deployment; leave it out", param=f"/{name}")
        known: Iterable[str] = {*type(body).model_fields, *unsupported, *knobs}
        raise UnknownField(f"unknown field '{shown(name)}'{did_you_mean(name, known)}", param=pointer_of([name]))
    return {name: value for name, value in extra.items() if name in knobs}
