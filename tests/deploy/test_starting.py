"""What a start does for its own speed: no cyclic collections until it is over, and a clock that tells its parts."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from astrai_deploy._collector import paused, settle
from astrai_deploy._laps import Laps
from astrai_deploy.cli import main


@pytest.fixture
def collector() -> Iterator[None]:
    """The collector as it was before."""
    was = gc.isenabled()
    gc.enable()
    yield
    gc.unfreeze()
    (gc.enable if was else gc.disable)()


@pytest.mark.usefixtures("collector")
def test_the_collector_rests_until_the_start_is_over() -> None:
    with paused():
        assert not gc.isenabled()
        settle()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()


@pytest.mark.usefixtures("collector")
def test_the_collector_is_as_before_when_a_start_fails() -> None:
    with pytest.raises(RuntimeError), paused():
        raise RuntimeError
    assert gc.isenabled()
    gc.disable()
    with paused():
        pass
    assert not gc.isenabled()


@pytest.mark.usefixtures("collector")
def test_a_command_gives_the_collector_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "+recipe=no_such_recipe"]) == 2
    assert "no_such_recipe" in capsys.readouterr().err
    assert gc.isenabled()


def test_parts_are_told_in_order_and_add_up() -> None:
    ticks = iter([10.0, 11.5, 11.5, 14.0, 15.0])
    laps = Laps(lambda: next(ticks))
    for part in ("plan", "kernels", "weights", "plan"):
        laps.lap(part)
    assert list(laps.parts.items()) == [("plan", 2.5), ("kernels", 0.0), ("weights", 2.5)]
