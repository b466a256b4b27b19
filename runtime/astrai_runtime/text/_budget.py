"""Bounds on what one rendering of a chat template may do: steps, printed characters and the size of every value."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.visitor import NodeVisitor

MAX_STEPS = 1_000_000  # loop rounds and calls of one rendering
MAX_CHARS = 1 << 24  # characters that one rendering may print, and that one value may hold
MAX_WORK = 1 << 34  # characters that one rendering may compare, sort or search
_ITEM_WORK = 1024  # characters that are compared in the time that one item of a list takes
_PLAIN = frozenset((int, float, bool, type(None)))
# Filters that compare or add up what they are given -> how often they may look at each part of it
READING = {"sort": 16, "dictsort": 16, "groupby": 16, "sum": 256, "unique": 2, "min": 1, "max": 1, "map": 1}
# Tests that compare, which filters like select() also call by name
COMPARING = (
    *("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le"),
    "in",
)
_MAX_COUNT = 100_000  # widths and repeats given to text functions; also the sandbox's own limit for range()
_MAX_BITS = 100_000  # of a power
_FORMAT_BOMB = re.compile(r"\d{6,}|[%.\d]\*|\{[^{}]*:[^{}]*\{")  # pads far, or takes its width from an argument
KEY = "budget of this rendering"  # not an identifier, so that no template can set it


class Budget:
    """What one rendering has left."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._chars = MAX_CHARS
        self._work = MAX_WORK

    def spend(self, chars: int = 0) -> None:
        """One step that prints `chars` characters.

        Raises:
            SecurityError: there is no more.
        """
        self._steps -= 1
        self._chars -= chars
        if self._steps < 0:
            raise SecurityError(f"the chat template takes more than {MAX_STEPS} steps")
        if self._chars < 0:
            raise SecurityError(f"the chat template prints more than {MAX_CHARS} characters")

    def read(self, value: Any, times: int = 1) -> None:
        """An operation that may look at all of `value`, nested values included, `times` times.

        Raises:
            SecurityError: `value` is too large, or so much was read before that no more may be.
        """
        if isinstance(value, str):
            self._work -= len(value) * times
        elif isinstance(value, dict | list | tuple | set):
            chars, items = measure(value)
            self._work -= (chars + items * _ITEM_WORK) * times
        if self._work < 0:
            raise SecurityError("the chat template compares, sorts or searches too much")


def of(context: Context) -> Budget:
    found = context.resolve(KEY)
    assert isinstance(found, Budget)
    return found


def instrument(tree: nodes.Template) -> nodes.Template:
    """Makes every loop round, macro body and comparison pay for itself, and sizes what `~` joins."""
    _Checks().visit(tree)
    for block in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(block, nodes.For | nodes.Macro | nodes.CallBlock)
        text = sum(len(data.data) for data in block.find_all(nodes.TemplateData))
        block.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(text), "_pay"), lineno=block.lineno))
        if isinstance(block, nodes.For) and block.test is not None:
            block.iter = _filter(block.iter, "_pay_each")  # rounds that the condition skips have no body
    return tree


class _Checks(NodeVisitor):
    """Puts checks around the operations that the sandbox cannot intercept.

    What `a ~ b` joins is sized. What may look at whole values, however deep they are, pays for what it may read:
    comparisons, and subscripts and keys, which are hashed.
    """

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, field, self.visit(value))
            elif isinstance(value, list):
                value[:] = [self.visit(item) if isinstance(item, nodes.Node) else item for item in value]
        if isinstance(node, nodes.Concat):
            node.nodes = [_filter(part, "_weighed") for part in node.nodes]
            return _filter(node, "_sized")
        if isinstance(node, nodes.Compare):
            node.expr = _read(node.expr)
            for operand in node.ops:
                operand.expr = _read(operand.expr)
        elif isinstance(node, nodes.Getitem) and node.ctx == "load" and not isinstance(node.arg, nodes.Slice):
            node.arg = _read(node.arg)
        elif isinstance(node, nodes.Pair):
            node.key = _read(node.key)
        return node


def _read(expression: nodes.Expr) -> nodes.Expr:
    return expression if isinstance(expression, nodes.Const) else _filter(expression, "_read")


def _filter(expression: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(expression, nodes.Expr)
    return nodes.Filter(expression, name, [], [], None, None, lineno=expression.lineno)


@jinja2.pass_context
def count_printed(context: Context, value: Any) -> Any:
    """Called on everything that a template prints; changes nothing."""
    of(context).spend(len(value) if isinstance(value, str) else weight(value))
    return value


@jinja2.pass_context
def _read_all(context: Context, value: Any) -> Any:
    of(context).read(value)
    return value


def reading(function: Any, times: int) -> Callable[..., Any]:
    """A filter or test that pays for what it may read. Knows what `function` wants to be given first."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @jinja2.pass_context
    def paid(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        left = of(context)
        for part in (value, *args, *kwargs.values()):
            left.read(part, times)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        return function(*((first[wanted],) if wanted else ()), value, *args, **kwargs)

    return paid


@jinja2.pass_context
def _pay(context: Context, chars: int) -> int:
    of(context).spend(chars)
    return chars


@jinja2.pass_context
def _pay_each(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    """Undefined and what cannot be iterated stay what they are: their own errors explain them best."""
    if isinstance(items, jinja2.Undefined) or not isinstance(items, Iterable):
        return items
    left = of(context)

    def paid() -> Iterator[Any]:
        for item in items:
            left.spend()
            yield item

    return paid()


def weight(value: Any) -> int:
    """Characters that printing `value` takes at least, nested values included. Walks over MAX_STEPS items at most."""
    chars, items = measure(value)
    return chars + items


def measure(value: Any) -> tuple[int, int]:
    """Characters and items of `value`, nested ones included, as often as they are met."""
    chars, items = 0, 0
    waiting: list[Collection[Any]] = [(value,)]
    while waiting:
        group = waiting.pop()
        items += len(group)
        for item in group:
            if isinstance(item, str):
                chars += len(item)
            elif type(item) in _PLAIN:
                continue
            elif isinstance(item, dict):
                waiting += (item.keys(), item.values())
            elif isinstance(item, list | tuple | set):
                waiting.append(item)
        if chars + items > MAX_CHARS or items > MAX_STEPS:
            raise SecurityError("a value that holds so many others is too large for a chat template")
    return chars, items


def weighed(value: Any) -> Any:
    weight(value)
    return value


def sized(value: Any) -> Any:
    """The value, unless it alone is longer than a rendering may print."""
    if isinstance(value, str | list | tuple) and len(value) > MAX_CHARS:
        raise SecurityError(f"a value of {len(value)} characters or items is too large for a chat template")
    return value


def check_count(value: Any) -> None:
    if isinstance(value, int) and abs(value) > _MAX_COUNT:
        raise SecurityError(f"{value} is too large a width or count for a chat template")


def check_format(pattern: str) -> None:
    if _FORMAT_BOMB.search(pattern):
        raise SecurityError("the chat template's format string may pad too far")


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuses the operations whose result could be far larger than what goes in."""
    if operator == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:
        raise SecurityError(f"{left} ** {right} is too large a number for a chat template")
    if operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str | list | tuple) and isinstance(times, int) and len(many) * times > _MAX_COUNT:
                raise SecurityError(f"a value repeated {times} times is too large for a chat template")
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
            raise SecurityError("a product is too large a number for a chat template")
    if operator == "%" and isinstance(left, str):
        check_format(left)
        weight(right)


def check_text_call(name: str, text: str, *args: Any) -> None:
    """Refuses calls of text functions whose result could be far larger than what goes in."""
    for value in args:
        check_count(value)
    if name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        sized_text = text.count(args[0]) * len(args[1])
        if sized_text > MAX_CHARS:
            raise SecurityError("the chat template's replace() makes too long a text")
    if name == "join" and args:
        items = weight(args[0]) if isinstance(args[0], list | tuple | dict | set) else 0
        if items * (1 + len(text)) > MAX_CHARS:
            raise SecurityError("the chat template's join() makes too long a text")
    if name in {"format", "format_map"}:
        check_format(text)
        weight(list(args))


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A text filter under the same bounds as the text function of its name."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = [value for value in (*args, *kwargs.values()) if not isinstance(value, jinja2.Environment | Context)]
        given = [value for value in given if not isinstance(value, nodes.EvalContext)]
        if name == "join":
            glue = str(given[1]) if len(given) > 1 else ""
            if isinstance(given[0], list | tuple | dict | set):
                check_text_call(name, glue, given[0])
        elif given:
            check_text_call(name, given[0] if isinstance(given[0], str) else "", *given[1:])
            weight(given[0])
        return sized(function(*args, **kwargs))

    checked.__dict__.update(function.__dict__)  # keeps jinja's marks of what it passes first
    return checked


FILTERS: dict[str, Callable[..., Any]] = {
    "_pay": _pay,
    "_pay_each": _pay_each,
    "_read": _read_all,
    "_weighed": weighed,
    "_sized": sized,
}
