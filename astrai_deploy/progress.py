"""One line that shows what a long task is doing: a bar on a terminal, plain milestones in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from astrai_runtime.sources.base import Progress, Unit


@contextmanager
def shown(console: Console) -> Iterator[Progress]:
    """A Progress callback that draws on `console` until the block ends. One bar for each thing that is done."""
    if not console.is_terminal:
        yield _milestones(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        _Amount(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console, expand=True) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int, unit: Unit = "bytes", /) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total, unit=unit)
            bars.update(tasks[what], completed=done, total=total)

        yield advance


class _Amount(ProgressColumn):
    """How much is done, and how fast where it is bytes."""

    def render(self, task: Task) -> Text:
        done, total = int(task.completed), int(task.total or 0)
        if task.fields["unit"] != "bytes":
            return Text(f"{done} of {total} {task.fields['unit']}", style="progress.download")
        speed = task.finished_speed or task.speed
        rate = "" if speed is None else f" {decimal(int(speed))}/s"
        return Text(f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB{rate}", style="progress.download")


def _milestones(console: Console) -> Progress:
    """A line when something begins and when it is done: what a log file wants."""
    state: dict[str, bool] = {}

    def advance(what: str, done: int, total: int, unit: Unit = "bytes", /) -> None:
        if what not in state:
            state[what] = False
            amount = f"{total / 2**20:,.0f} MiB" if unit == "bytes" else f"{total:,} {unit}"
            console.print(f"{what}: {amount}", highlight=False)
        if done >= total and not state[what]:
            state[what] = True
            console.print(f"{what}: done", highlight=False)

    return advance
