"""Rules between groups that need no machine. Rules that do need one are the plan's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from astrai_deploy._problem import Key
from astrai_runtime import part
from astrai_runtime.errors import did_you_mean
from astrai_runtime.protocols import _tokens

Clash = tuple[Key, str]  # the key to change, and why


def broken_rules(groups: Mapping[str, Any]) -> Iterator[Clash]:
    """Every broken rule among the groups that are valid in themselves."""
    for needs, rule in RULES:
        if all(name in groups for name in needs):
            yield from rule(*(groups[name] for name in needs))


def known_backends(attention: Any) -> Iterator[Clash]:
    known = part.names("attention")
    for index, name in enumerate(attention.priority):
        if name not in known:
            there = f"there are: {', '.join(known)}{did_you_mean(name, known)}"
            yield ("attention", "priority", index), f"no attention backend named '{name}'; {there}"
    yield from _repeated(("attention", "priority"), attention.priority)


def known_stages(sampling: Any) -> Iterator[Clash]:
    known = part.names("sampling")
    for index, name in enumerate(sampling.pipeline):
        if name not in known:
            there = f"there are: {', '.join(known)}{did_you_mean(name, known)}"
            yield ("sampling", "pipeline", index), f"no sampling stage named '{name}'; {there}"
    yield from _repeated(("sampling", "pipeline"), sampling.pipeline)


def defaults_are_obeyed(sampling: Any) -> Iterator[Clash]:
    """A default that no declared stage obeys would be ignored in silence. Temperature 0 is greedy, with any pipeline."""
    stages = {name: part.load("sampling", name) for name in part.names("sampling")}
    declared = {knob.name: knob for name in sampling.pipeline if name in stages for knob in stages[name].knobs}
    given: dict[str, Any] = sampling.model_dump(exclude={"pipeline", "logprobs_mode", "seed", "extra"})
    for stage, cls in stages.items():
        for knob in cls.knobs:
            value = given.get(knob.name)
            greedy = knob.name == "temperature" and value == 0
            if value is not None and knob.name not in declared and value != knob.neutral and not greedy:
                message = f"{value:g} has no effect: sampling.pipeline lacks '{stage}'; add it, or set {knob.neutral:g}"
                yield ("sampling", knob.name), message
    for name, value in sampling.extra.items():
        knob = declared.get(name)
        if knob is None:
            yield ("sampling", "extra", name), f"no stage of sampling.pipeline obeys '{name}'{did_you_mean(name, declared)}"
        elif not knob.low <= value <= knob.high:
            yield ("sampling", "extra", name), f"must be between {knob.low:g} and {knob.high:g} (got {value:g})"
        elif knob.choices and value not in knob.choices:
            there = " or ".join(f"{choice:g}" for choice in knob.choices)
            yield ("sampling", "extra", name), f"must be {there} (got {value:g})"


def routes_differ(protocols: Any) -> Iterator[Clash]:
    seen = {lookup.path: "the service itself" for lookup in _tokens.lookups()}
    for name, protocol in protocols.items():
        for field in ("path", "completions_path"):
            path = getattr(protocol, field, None)
            if path is not None and path in seen:
                yield ("protocols", name, field), f"'{path}' is taken by {seen[path]}; choose another path"
            elif path is not None:
                seen[path] = f"protocols.{name}"


def pages_fit_the_context(model: Any, kv: Any) -> Iterator[Clash]:
    size = getattr(kv, "page_size", None)
    if isinstance(size, int) and isinstance(model.context, int) and size > model.context:
        message = f"a page of {size} tokens is larger than model.context={model.context}; lower one or raise the other"
        yield ("kv", "page_size"), message


def strangers_need_a_key(server: Any) -> Iterator[Clash]:
    if not (server.on_loopback or server.keyed or server.allow_open):
        message = (
            f"'{server.host}' lets other machines in, and no key is asked for: declare server.api_keys or "
            "server.api_key_file, keep 127.0.0.1, or say server.allow_open=true"
        )
        yield ("server", "host"), message


def _repeated(key: Key, names: tuple[str, ...]) -> Iterator[Clash]:
    for index, name in enumerate(names):
        if name in names[:index]:
            yield (*key, index), f"'{name}' is listed twice; once is enough"


RULES: tuple[tuple[tuple[str, ...], Callable[..., Iterator[Clash]]], ...] = (
    (("attention",), known_backends),
    (("sampling",), known_stages),
    (("sampling",), defaults_are_obeyed),
    (("protocols",), routes_differ),
    (("server",), strangers_need_a_key),
    (("model", "kv"), pages_fit_the_context),
)
