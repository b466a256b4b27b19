"""The environment that chat templates run in: transformers' dialect of Jinja, sandboxed.

A template comes with a model file and is a stranger's program. The immutable sandbox keeps it from Python's internals;
`_budget.py` bounds what one rendering may do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from astrai_runtime.text import _budget as budget


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Where templates are compiled and rendered. One environment may render in several threads at once."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=budget.count_printed,
        )
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_PlainNamespace, dict=_make_dict
        )
        del self.globals["lipsum"]
        for name in ("batch", "center", "format", "indent", "join", "replace", "slice", "string", "wordwrap"):
            self.filters[name] = budget.bounded(name, self.filters[name])
        for name in ("pprint", "urlize", "xmlattr"):
            del self.filters[name]
        self.filters["tojson"] = _tojson
        for name, times in budget.READING.items():
            self.filters[name] = budget.reading(self.filters[name], times)
        for name in budget.COMPARING:
            self.tests[name] = budget.reading(self.tests[name], 1)
        self.filters.update(budget.FILTERS)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = budget.instrument(super()._parse(source, name, filename))
        tree.set_environment(self)  # also of the nodes that were put in
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  as overridden
        left = budget.of(__context)
        left.spend()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | list | tuple | dict):  # index(), count(), get(), ...
            for value in (*args, *kwargs.values(), None if isinstance(owner, dict) else owner):
                left.read(value)
        if isinstance(owner, str):
            budget.check_text_call(getattr(__obj, "__name__", ""), owner, *args, *kwargs.values())
        return budget.sized(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            budget.check_format(value.__self__)
        return wrapped

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """The reference prints nothing for what the sandbox forbids; here reaching for it is an error."""
        raise SecurityError(f"a chat template cannot read {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget.check_operands(operator, left, right)
        return budget.sized(super().call_binop(context, operator, left, right))


class _Generation(Extension):
    """`{% generation %}` marks training targets in the reference renderer; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _PlainNamespace(Namespace):
    """`namespace()` without underscore names, which reach into Python's objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named `self`: a template may use that name
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _PlainNamespace._check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _PlainNamespace._check(name)
        Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a chat template cannot store {name!r} in a namespace")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    budget.check_format(format)
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own: no HTML escapes, other alphabets stay themselves, keys keep their order."""
    budget.weighed(value)
    budget.check_count(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def plain(value: Any) -> Any:
    """A copy made of nothing but JSON's types, so that no object with methods of its own reaches a template."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    raise TypeError(f"a chat template cannot be given a {type(value).__name__}")
