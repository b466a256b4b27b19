"""A Plan for people (tables and a memory bar, readable at 80 columns and without colours) and for programs (plain data)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from astrai_deploy._memory import Memory, size
from astrai_deploy._problem import REDACTED, sounds_secret
from astrai_deploy.plan import Plan, notable, place
from astrai_runtime import part
from astrai_runtime.protocols import _tokens
from astrai_runtime.server._openapi import SYSTEM_ROUTES

if TYPE_CHECKING:
    from astrai_deploy.compose import Composed

LABEL = 10  # columns
BAR = 64
PIECES = (  # field of Memory, name, mark in the bar, the same where there is only ASCII, colour
    ("overhead", "runtime", "▒", "r", "magenta"),
    ("tokenizer", "tokenizer", "▖", "v", "bright_black"),
    ("weights", "weights", "█", "w", "blue"),
    ("kv", "KV pool", "▓", "k", "cyan"),
    ("tables", "index tables", "▚", "t", "green"),
    ("activations", "activations", "░", "a", "yellow"),
)
TELLING = ("avx", "amx", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")  # CPU features that matter to inference


@dataclass(frozen=True, slots=True)
class Stage:
    """One sampling stage and the defaults that it gets, by knob."""

    name: str
    defaults: dict[str, float]


@dataclass(frozen=True, slots=True)
class Route:
    """One path of the service. `protocol` None: it belongs to the server itself."""

    protocol: str | None
    method: str
    path: str
    dialect: str | None


def stages(plan: Plan) -> list[Stage]:
    """The sampling pipeline in its order."""
    sampling = plan.deployment.sampling
    found = []
    for name in sampling.pipeline:
        knobs = part.load("sampling", name).knobs
        values = {knob.name: getattr(sampling, knob.name, sampling.extra.get(knob.name, knob.neutral)) for knob in knobs}
        found.append(Stage(name, values))
    return found


def routes(plan: Plan) -> list[Route]:
    """Each protocol's, then the server's own."""
    found = []
    for name, config in plan.deployment.protocols.items():
        protocol = part.load("protocols", config.kind)(config)
        for route in (*protocol.endpoints(), *protocol.lookups()):
            found.append(Route(name, "POST", route.path, getattr(config, "dialect", None)))
    found += [Route(None, "GET", path, None) for path in SYSTEM_ROUTES]
    return found + [Route(None, "POST", lookup.path, None) for lookup in _tokens.lookups()]


# -- for programs ------------------------------------------------------------------------------------------------------


def plan_json(plan: Plan, composed: Composed) -> dict[str, Any]:
    """The plan as plain data. Bytes are integers; secrets are redacted."""
    spec, memory, shape, deployment = plan.spec, plan.memory, plan.kv_shape, plan.deployment
    machine = asdict(plan.machine)
    telling = sorted(name for name in plan.machine.features if name.startswith(TELLING))
    machine |= {"features": telling, "software": sorted(plan.machine.software)}
    return {
        "recipe": composed.recipe,
        "promise": deployment.promise,
        "fits": plan.fits,
        "machine": machine,
        "model": {
            "name": deployment.model.name,
            "architecture": spec.architecture,
            "parameters": plan.headers.n_parameters,
            "layers": spec.n_layers if plan.headers.tensors else 0,
            "vocabulary": spec.vocab_size,
            "dtype": plan.dtype,
            "weights": plan.weights if plan.headers.tensors else None,
            "weight_bytes": dict(plan.weight_bytes),
            "context": plan.known_context,
            "own_context": spec.context,
            "origin": plan.located.origin,
            "stored": list(plan.headers.types),
            "file_bytes": plan.headers.file_bytes,
        },
        "provider": {"kind": deployment.provider.kind, "answers": "text" if plan.relays else "logits"},
        "memory": asdict(memory) | {"serving": memory.serving, "peak": memory.peak, "usable": memory.usable},
        "kv": {
            "kind": deployment.kv.kind,
            "dtype": shape.dtype,
            "n_tokens": shape.n_tokens,
            "bytes_per_token": shape.bytes_per_token,
            "full_contexts": plan.full_contexts,
            "max_batch_size": shape.max_batch_size,
        },
        "attention": {
            phase: {"backend": choice.name, "passed_over": dict(choice.passed_over)}
            for phase, choice in plan.choices.items()
        },
        "kernels": None if plan.native is None else asdict(plan.native),
        "sampling": [asdict(stage) for stage in stages(plan)],
        "routes": [
            asdict(route) | {"origin": _place(composed, f"protocols.{route.protocol}.path") if route.protocol else ""}
            for route in routes(plan)
        ],
        "server": {"host": deployment.server.host, "port": deployment.server.port},
        "decisions": [asdict(each) | {"origin": _place(composed, each.key)} for each in plan.decisions],
        "set": [{"key": key, "value": value, "origin": origin} for key, value, origin in settings(composed)],
        "shadowed": dict(composed.shadowed),
        "problem": None if plan.problem is None else asdict(plan.problem) | {"key": plan.problem.key},
    }


def settings(composed: Composed) -> Iterator[tuple[str, str, str]]:
    """(key, value, place) of what the shipped options did not set, secrets redacted."""
    for key, setting in notable(composed.origins).items():
        if key != "promise":  # the title
            value = REDACTED if sounds_secret(tuple(key.split("."))) else setting.value
            yield key, value, place(setting.origin)


def _place(composed: Composed, key: str) -> str:
    origin = composed.origin(key)
    return place(origin) if origin else ""


# -- for people --------------------------------------------------------------------------------------------------------


def print_plan(plan: Plan, composed: Composed, console: Console) -> None:
    """What will run, on what, why, and whether it fits."""
    title = f"{composed.recipe}: {plan.deployment.promise}" if composed.recipe else plan.deployment.promise
    with console.capture() as drawn:
        console.print(Text(title, style="bold"), highlight=False)
        console.print()
        for label, content in _sections(plan, composed, ascii_only=console.options.ascii_only):
            grid = Table.grid(padding=(0, 1))
            grid.add_column(width=LABEL, style="bold")
            grid.add_column(overflow="fold")
            grid.add_row(label, content)
            console.print(grid, highlight=False)
        console.print()
        console.print(_verdict(plan), highlight=False)
    for line in Text.from_ansi(drawn.get()).split(allow_blank=False):
        line.rstrip()  # tables pad their cells, which shows when the output is copied
        console.print(line, highlight=False)


def _sections(plan: Plan, composed: Composed, *, ascii_only: bool) -> Iterator[tuple[str, RenderableType]]:
    server = plan.deployment.server

    def at(key: str) -> str:
        return _place(composed, key)

    def and_at(text: str, key: str) -> str:
        return f"{text} ({at(key)})" if at(key) else text

    yield "model", _model(plan, at("model.name"))
    if plan.weight_bytes:
        yield "weights", _lines(_weights(plan))
    yield "machine", _machine(plan)
    yield "memory", _memory(plan.memory, ascii_only=ascii_only)
    if not plan.relays:
        yield "KV", _kv(plan)
        yield "attention", _lines(*_attention(plan), origin=at("attention.priority"))
    pipeline = " > ".join(_stage(stage) for stage in stages(plan)) or "no stage: greedy, or a draw from the model's own"
    yield "sampling", _lines(pipeline, origin=at("sampling.pipeline"))
    yield "decided", _rows((each.key, each.value, and_at(each.reason, each.key)) for each in plan.decisions)
    spoken = ((r.method, r.path, and_at(_protocol(r), f"protocols.{r.protocol}.path")) for r in routes(plan) if r.protocol)
    own = [r for r in routes(plan) if r.protocol is None]
    paths = [f"{how:<4} {' '.join(r.path for r in own if r.method == how)}" for how in ("GET", "POST")]
    yield "routes", Group(_rows(spoken), Text("\n".join(paths)))
    yield "server", _lines(and_at(f"http://{server.host}:{server.port or '(any free port)'}", "server.port"))
    if said := list(settings(composed)):
        yield "set", _rows((key, _short(value), origin) for key, value, origin in said)
    if composed.shadowed:
        yield "shadows", _lines(*(f"{mine} replaces the shipped {theirs}" for mine, theirs in composed.shadowed.items()))


def _lines(*lines: str, origin: str = "") -> Text:
    text = Text("\n".join(lines))
    return text.append(f"\n{origin}", style="dim") if origin else text


def _model(plan: Plan, origin: str) -> Text:
    spec, model = plan.spec, plan.deployment.model
    if not plan.headers.tensors:
        context = f"{plan.known_context:,} tokens" if plan.known_context else "as large as the other service's"
        where = f"another service answers: {plan.deployment.provider.model_dump()['url']}" if plan.relays else "no weights"
        return _lines(f"{model.name}: {plan.located.origin}, {where}", f"context {context}", origin=origin)
    return _lines(
        f"{model.name}: {spec.architecture}, {_count(spec.n_parameters())} parameters, {spec.n_layers} layers, "
        f"vocabulary {spec.vocab_size:,}",
        f"{_types(plan)}, context {plan.context:,} tokens",
        f"from {plan.located.origin} ({size(plan.headers.file_bytes)}: {', '.join(plan.headers.types[:3])})",
        origin=origin,
    )


def _types(plan: Plan) -> str:
    return plan.dtype if plan.native is None else f"{plan.weights} weights"


def _weights(plan: Plan) -> str:
    """What each choice of `model.weights` would take; the planned one has a star."""
    costs = ((name, f"{name} {_rough(n_bytes)}") for name, n_bytes in plan.weight_bytes.items())
    return " | ".join(f"{cost} *" if name == plan.weights else cost for name, cost in costs)


def _rough(n_bytes: int) -> str:
    """Bytes without decimals from 10 on: four of them must fit into a line."""
    amount, unit = size(n_bytes).split()
    return f"{float(amount):.0f} {unit}" if float(amount) >= 10 else f"{amount} {unit}"


def _machine(plan: Plan) -> Text:
    machine = plan.machine
    capability = machine.compute_capability
    compute = f", compute capability {capability[0]}.{capability[1]}" if capability else ""
    lines = [f"{machine.name}: {machine.device}{compute}, {machine.cores} cores, {size(machine.memory_bytes)}"]
    if not machine.probed:
        lines.append("a description to plan with; serving needs machine=auto")
    return _lines(*lines)


def _memory(memory: Memory, *, ascii_only: bool) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column()
    table.add_column(justify="right")
    for field, name, mark, letter, colour in PIECES:
        table.add_row(Text(letter if ascii_only else mark, style=colour), name, size(getattr(memory, field)))
    table.add_row("", Text("at most", style="bold"), Text(size(memory.peak), style="bold"), _peak(memory))
    return Group(_bar(memory, ascii_only=ascii_only), table)


def _peak(memory: Memory) -> Text:
    when = "while loading, " if memory.peak > memory.serving else ""
    return Text(f"{when}{memory.peak / memory.usable:.0%} of the {size(memory.usable)} that can be used")


def _bar(memory: Memory, *, ascii_only: bool) -> Text:
    """The machine's memory as a line, one mark a share; past `|` it cannot be used."""
    whole = max(memory.machine, memory.serving, 1)
    bar, filled = Text(), 0.0
    for field, _, mark, letter, colour in PIECES:
        start = round(filled * BAR / whole)
        filled += getattr(memory, field)
        bar.append((letter if ascii_only else mark) * (round(filled * BAR / whole) - start), style=colour)
    limit = round(memory.usable * BAR / whole)
    bar.append(("." if ascii_only else "·") * (BAR - len(bar)), style="dim")
    return Text("|").join((bar[:limit], bar[limit:]))


def _kv(plan: Plan) -> Text:
    shape = plan.kv_shape
    page = getattr(plan.deployment.kv, "page_size", None)
    pages = f" in pages of {page}" if page else ""
    contexts = "1 whole context" if plan.full_contexts == 1 else f"{plan.full_contexts} whole contexts"
    cost = f"{size(shape.bytes_per_token)} a token ({shape.dtype})"
    return _lines(
        f"{plan.deployment.kv.kind}: {shape.n_tokens:,} tokens{pages}, {cost}",
        f"room for {contexts} of {plan.context:,} tokens at once; at most {shape.max_batch_size} sequences run together",
    )


def _attention(plan: Plan) -> Iterator[str]:
    phases = list(plan.choices.items())
    for (phase, choice), later in zip(phases, (*phases[1:], None), strict=True):
        yield f"{phase:<8} {choice.name}"
        same = later is not None and later[1] == choice  # the next phase says why for both
        for name, reason in () if same else choice.passed_over:
            yield f"         not {name}: {reason}"


def _stage(stage: Stage) -> str:
    values = [f"{value:g}" if knob == stage.name else f"{knob} {value:g}" for knob, value in stage.defaults.items()]
    return f"{stage.name} {', '.join(values)}" if len(values) == 1 else stage.name


def _protocol(route: Route) -> str:
    return f"{route.protocol}, dialect {route.dialect}" if route.dialect else f"{route.protocol}"


def _rows(rows: Iterator[tuple[str, str, str]]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold", style="dim")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _verdict(plan: Plan) -> Text:
    if plan.problem is not None:
        return Text(str(plan.problem), style="bold red")
    return Text(f"fits: {size(plan.memory.peak)} of {size(plan.memory.usable)}", style="bold green")


def _short(value: str) -> str:
    return value if len(value) <= 24 else f"{value[:23]}…"


def _count(number: int) -> str:
    for unit, factor in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return str(number)
