"""The schema seen from a key: which fields are known there, who else would know one, and whether it holds secrets."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter

from astrai_deploy._problem import Key
from astrai_deploy.parts import ByKind
from astrai_runtime.errors import UnknownPart


@dataclass(frozen=True)
class Shape:
    """What may stand at one place. `model`: the class whose fields are the keys there, if it is a mapping of fields."""

    annotation: Any
    model: type[BaseModel] | None
    union: ByKind | None = None
    kind: str | None = None  # of the data at this place

    @staticmethod
    def of(annotation: Any, data: Any = None) -> Shape:
        """The shape of a type, where `data` chooses among kinds."""
        union, kind, inner = None, None, annotation
        if get_origin(annotation) is Annotated:
            inner, *metadata = get_args(annotation)
            union = next((one for one in metadata if isinstance(one, ByKind)), None)
        if union is not None:
            kind = str(data.get("kind")) if isinstance(data, Mapping) else None
            try:
                return Shape(annotation, union.config(kind or ""), union, kind)
            except UnknownPart:
                return Shape(annotation, None, union, kind)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return Shape(annotation, inner)
        return Shape(annotation, None)

    def inside(self, part: str | int, data: Any) -> Shape | None:
        """The shape one level down; None where the schema knows nothing."""
        value = data.get(part) if isinstance(data, Mapping) else None
        if self.model is not None:
            field = self.model.model_fields.get(str(part))
            if field is None:
                return None
            annotation = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
            return Shape.of(annotation, value)
        for option in self._options():
            arguments = get_args(option)
            if arguments and get_origin(option) in (dict, tuple, list, frozenset):
                if isinstance(data, list) and isinstance(part, int) and part < len(data):
                    value = data[part]
                return Shape.of(arguments[-1] if get_origin(option) is dict else arguments[0], value)
        return None

    def at(self, key: Key, data: Any) -> Shape | None:
        """The shape at a key below this one."""
        shape: Shape | None = self
        for part in key:
            shape = shape.inside(part, data) if shape is not None else None
            if isinstance(data, Mapping):
                data = data.get(part)
            elif isinstance(data, list) and isinstance(part, int) and part < len(data):
                data = data[part]
        return shape

    def fields(self) -> list[str]:
        return list(self.model.model_fields) if self.model else []

    def kinds_with(self, name: str) -> list[str]:
        """Other kinds that could stand here and know this field."""
        kinds = self.union.names() if self.union else []
        return [kind for kind in kinds if kind != self.kind and self.union and name in self.union.config(kind).model_fields]

    def holds(self, wanted: type) -> bool:
        """Whether a type occurs in this place's type."""

        def search(annotation: Any) -> bool:
            return annotation is wanted or any(search(one) for one in get_args(annotation))

        return search(self.annotation)

    def validate(self, value: Any) -> Any:
        return TypeAdapter(self.annotation).validate_python(value)

    def _options(self) -> list[Any]:
        inner = get_args(self.annotation)[0] if get_origin(self.annotation) is Annotated else self.annotation
        return list(get_args(inner)) if get_origin(inner) in (Union, types.UnionType) else [inner]
