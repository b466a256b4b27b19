"""Starting without the cyclic garbage collector: what loading makes stays, and walking through it again and again is slow.

Python's own counting frees what is not a cycle as always. Cycles made until `settle` are never looked for: some ten
thousand small objects, which a full collection would take longer to find than the rest of the start takes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No cyclic collections until the block ends or `settle` is called in it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def settle() -> None:
    """The start is over: cycles are collected again, but among what is made from now on.

    Modules, vocabulary and plan are set aside, so that no request waits for a walk through all of them.
    """
    gc.freeze()
    gc.enable()
