"""One line that shows what a long task is doing: a bar on a terminal, plain milestones in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from astrai_runtime.sources.base import Progress


@contextmanager
def shown(console: Console) -> Iterator[Progress]:
    """A Progress callback that draws on `console` until the block ends. One bar for each thing that is done."""
    if not console.is_terminal:
        yield _milestones(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console, expand=True) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield advance


def _milestones(console: Console) -> Progress:
    """A line when something begins and when it is done: what a log file wants."""
    state: dict[str, bool] = {}

    def advance(what: str, done: int, total: int) -> None:
        if what not in state:
            state[what] = False
            console.print(f"{what}: {total / 2**20:,.0f} MiB", highlight=False)
        if done >= total and not state[what]:
            state[what] = True
            console.print(f"{what}: done", highlight=False)

    return advance
