"""A live service in this process: real configuration, engine and sockets, without the cost of a second interpreter."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from astrai_runtime import log

CACHE = Path(__file__).resolve().parent.parent / ".pytest_cache"  # conftest.py keeps the compiled kernels there


@contextmanager
def quiet() -> Iterator[None]:
    """Only errors are logged; afterwards the log is as it was."""
    before, root = structlog.get_config(), logging.getLogger()
    handlers = list(root.handlers)
    log.configure("ERROR", "console")
    try:
        yield
    finally:
        structlog.configure(**before)
        root.handlers = handlers


@contextmanager
def serving(*overrides: str) -> Iterator[str]:
    """`astrai-deploy +recipe=tiny OVERRIDES...` on a free port. Yields its URL; at the end it must stop within seconds."""
    from astrai_deploy.build import build
    from astrai_deploy.compose import compose
    from astrai_deploy.plan import make_plan
    from astrai_deploy.service import listen

    own = (f"run.cache={CACHE}", "kernels.packed_cache=false")  # compiled kernels; nothing goes to the user's folders
    plan = make_plan(compose(["+recipe=tiny", *own, *overrides, "server.port=0"]))
    assert plan.fits
    server, state = listen(plan.deployment)
    engine = None
    with quiet():
        try:
            built = build(plan)
            engine = built.engine
            engine.start()
            state.ready(engine, built.agent)
            yield server.url
        finally:
            server.stop()
            assert server.join(10)
            if engine is not None:
                engine.shutdown()
