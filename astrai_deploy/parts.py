"""A kind in YAML -> the configuration class of the part that obeys it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from astrai_runtime import part
from astrai_runtime.errors import UnknownPart
from astrai_runtime.part import PartConfig


class ByKind:
    """Annotates a field whose class is named by the value's own `kind`.

    The union is open: its members are the files of a group of `astrai_runtime` and what other distributions registered.
    Only the part that is named gets imported, so a broken one elsewhere harms nobody.
    """

    def __init__(self, group: str, choices: Mapping[str, type[PartConfig]] | None = None) -> None:
        self.group = group
        self._choices = choices

    def names(self) -> list[str]:
        """Every kind that can be written here."""
        return part.names(self.group) if self._choices is None else sorted(self._choices)

    def config(self, kind: str) -> type[PartConfig]:
        """The configuration class of one kind.

        Raises:
            UnknownPart: there is no such kind; the message lists those that exist.
        """
        if self._choices is None:
            found: type[PartConfig] = part.load(self.group, kind).Config
            return found
        if kind not in self._choices:
            raise UnknownPart(self.group, kind, self.names())
        return self._choices[kind]

    def validate(self, value: Any) -> PartConfig:
        """The value as the class that its `kind` names; pydantic reports what is wrong with it."""
        if isinstance(value, PartConfig):
            value = value.model_dump(round_trip=True)
        if not isinstance(value, Mapping):
            raise _refused("not_a_mapping", f"must be a mapping with a kind: {self._there()}")
        if value.get("kind") is None:
            raise _refused("no_kind", f"has no kind; there are: {self._there()}")
        try:
            config = self.config(str(value["kind"]))
        except UnknownPart as error:
            raise _refused("unknown_kind", error.message) from None
        return config.model_validate(value)

    def _there(self) -> str:
        return ", ".join(self.names()) or "none yet"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def dump(value: PartConfig, info: core_schema.SerializationInfo) -> dict[str, Any]:
            return value.model_dump(mode=info.mode, round_trip=info.round_trip)

        return core_schema.no_info_plain_validator_function(
            self.validate, serialization=core_schema.plain_serializer_function_ser_schema(dump, info_arg=True)
        )


def _refused(kind: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{message}", {"message": message})
