"""Bounds on what one rendering of a chat template may do: steps, printed characters and the size of every value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.visitor import NodeVisitor

MAX_STEPS = 1_000_000  # loop rounds and calls of one rendering
MAX_CHARS = 1 << 24  # characters that one rendering may print, and that one value may hold
_MAX_COUNT = 100_000  # widths and repeats given to text functions; also the sandbox's own limit for range()
_MAX_BITS = 100_000  # of a power
_FORMAT_BOMB = re.compile(r"\d{6,}|[%.\d]\*|\{[^{}]*:[^{}]*\{")  # pads far, or takes its width from an argument
KEY = "budget of this rendering"  # not an identifier, so that no template can set it


class Budget:
    """What one rendering has left."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._chars = MAX_CHARS

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


def of(context: Context) -> Budget:
    found = context.resolve(KEY)
    assert isinstance(found, Budget)
    return found


def instrument(tree: nodes.Template) -> nodes.Template:
    """Makes every loop round and every macro body pay for itself, and sizes what `~` joins."""
    _SizeJoined().visit(tree)
    for block in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(block, nodes.For | nodes.Macro | nodes.CallBlock)
        text = sum(len(data.data) for data in block.find_all(nodes.TemplateData))
        block.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(text), "_pay"), lineno=block.lineno))
        if isinstance(block, nodes.For) and block.test is not None:
            block.iter = _filter(block.iter, "_pay_each")  # rounds that the condition skips have no body
    return tree


class _SizeJoined(NodeVisitor):
    """Puts a size check around every `a ~ b`, the one operator that the sandbox cannot intercept."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, field, self.visit(value))
            elif isinstance(value, list):
                value[:] = [self.visit(item) if isinstance(item, nodes.Node) else item for item in value]
        if isinstance(node, nodes.Concat):
            node.nodes = [_filter(part, "_weighed") for part in node.nodes]
            return _filter(node, "_sized")
        return node


def _filter(expression: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(expression, nodes.Expr)
    return nodes.Filter(expression, name, [], [], None, None, lineno=expression.lineno)


@jinja2.pass_context
def count_printed(context: Context, value: Any) -> Any:
    """Called on everything that a template prints; changes nothing."""
    of(context).spend(len(value) if isinstance(value, str) else weight(value))
    return value


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
    total, items, waiting = 0, 0, [value]
    while waiting:
        item = waiting.pop()
        items += 1
        total += 1 + (len(item) if isinstance(item, str) else 0)
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            waiting += item
        if total > MAX_CHARS or items + len(waiting) > MAX_STEPS:
            raise SecurityError("a value that holds so many others is too large for a chat template")
    return total


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


FILTERS: dict[str, Callable[..., Any]] = {"_pay": _pay, "_pay_each": _pay_each, "_weighed": weighed, "_sized": sized}
