"""Choosing a backend: the first that can, strictly or not; and the caller's demand by context manager."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from astrai_runtime import part
from astrai_runtime.attention import ATTN_BACKEND, _select, attn_backend, required_backend
from astrai_runtime.attention._config import AttentionConfig
from astrai_runtime.attention._select import Choice
from astrai_runtime.attention.base import AttentionShape, Phase
from astrai_runtime.errors import BackendRefused, UnknownPart
from astrai_runtime.machine import Machine

LAPTOP = Machine("laptop", "cpu", 8 << 30, 2)
PLAIN = AttentionShape(4, 2, 64, "float32")
CAPPED = AttentionShape(4, 2, 64, "float32", softcap=50.0)


def config(*priority: str, strict: bool = False) -> AttentionConfig:
    return AttentionConfig(priority=priority, strict=strict)


def select(wanted: AttentionConfig, machine: Machine, shape: AttentionShape, phase: Phase) -> Choice:
    """The choice where every backend would serve the same shape."""
    return _select.select(wanted, machine, lambda backend: shape, phase)


def test_first_backend_that_can_serve_is_chosen() -> None:
    assert select(config("torch_native"), LAPTOP, PLAIN, "decode") == Choice("torch_native")


def test_unknown_backend_is_an_error_with_a_near_name_wherever_it_stands() -> None:
    with pytest.raises(UnknownPart, match="did you mean 'torch_native'"):
        select(config("torch_native", "torch_nativ"), LAPTOP, PLAIN, "decode")


def test_strict_choice_names_the_reason_and_the_way_out() -> None:
    with pytest.raises(BackendRefused, match=r"'torch_native' was required, but .*soft cap.*attention=auto"):
        select(config("torch_native", strict=True), LAPTOP, CAPPED, "prefill")


def test_when_every_backend_refuses_all_reasons_are_listed() -> None:
    with pytest.raises(
        BackendRefused, match=r"no backend can serve prefill on machine 'laptop' \('torch_native': .*soft cap"
    ):
        select(config("torch_native"), LAPTOP, CAPPED, "prefill")


def test_passed_over_backends_come_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    native = part.load("attention", "torch_native")

    class Picky(native):  # type: ignore[misc]  # a backend that another distribution would register
        @classmethod
        def refuses(cls, machine: Machine, shape: AttentionShape, phase: Phase) -> str | None:
            return "it needs a prefill" if phase == "decode" else None

    monkeypatch.setattr(part, "names", lambda group: ["picky", "torch_native"])
    monkeypatch.setattr(part, "load", lambda group, name: Picky if name == "picky" else native)
    wanted = config("picky", "torch_native")
    assert select(wanted, LAPTOP, PLAIN, "prefill") == Choice("picky")
    assert select(wanted, LAPTOP, PLAIN, "decode") == Choice("torch_native", (("picky", "it needs a prefill"),))


def test_context_manager_requires_a_backend_and_nests() -> None:
    assert required_backend() is None
    with attn_backend(ATTN_BACKEND.TORCH_NATIVE):
        assert required_backend() == "torch_native"
        with attn_backend("torch_native"):
            assert required_backend() == "torch_native"
        assert required_backend() == "torch_native"
    assert required_backend() is None


def test_context_manager_lets_go_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), attn_backend("torch_native"):
        raise ZeroDivisionError
    assert required_backend() is None


def test_unknown_name_fails_on_entry() -> None:
    with pytest.raises(UnknownPart, match="no attention named 'flesh'"), attn_backend("flesh"):
        pytest.fail("the block must not run")
    with pytest.raises(AttributeError, match="no attention named 'flesh'"):
        _ = ATTN_BACKEND.FLESH


def test_names_follow_the_files() -> None:
    assert [getattr(ATTN_BACKEND, name) for name in dir(ATTN_BACKEND)] == list(ATTN_BACKEND) == part.names("attention")


def test_tasks_do_not_see_each_others_demand() -> None:
    async def inside() -> str | None:
        with attn_backend("torch_native"):
            await asyncio.sleep(0)
            return required_backend()

    async def both() -> tuple[str | None, str | None]:
        task = asyncio.create_task(inside())
        await asyncio.sleep(0)
        outside = required_backend()
        return await task, outside

    assert asyncio.run(both()) == ("torch_native", None)


def test_choosing_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from astrai_runtime import part\n"
        "from astrai_runtime.attention import attn_backend\n"
        "import astrai_runtime.model._load\n"
        "for group in ('attention', 'kv', 'model'):\n"
        "    for name in part.names(group): part.load(group, name)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    runtime = Path(__file__).resolve().parents[2] / "runtime"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=runtime)
