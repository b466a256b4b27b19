"""The file name is the registry: what a group offers, and what is said about a name that nobody answers to."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from pydantic import ValidationError

from astrai_runtime import part
from astrai_runtime.errors import UnknownPart
from astrai_runtime.part import PartConfig

CLASS_GROUPS = (
    "attention",
    "kernels",
    "kv",
    "model",
    "protocols",
    "provider",
    "sampling",
    "scheduler",
    "sources",
    "weights",
)
KINDS = ("kv", "protocols", "provider", "scheduler", "sources")


@pytest.mark.parametrize("group", CLASS_GROUPS)
def test_every_file_of_a_group_offers_a_class(group: str) -> None:
    names = part.names(group)
    assert names == sorted(names)
    assert names
    assert "base" not in names
    assert not [name for name in names if name.startswith("_")]
    for name in names:
        assert isinstance(part.load(group, name), type), name


@pytest.mark.parametrize("group", KINDS)
def test_every_kind_is_the_name_of_its_file(group: str) -> None:
    for name in part.names(group):
        config = part.load(group, name).Config
        assert issubclass(config, PartConfig)
        assert config.model_fields["kind"].annotation.__args__ == (name,)
        assert all(field.is_required() for field in config.model_fields.values()), (
            f"{group}.{name}: YAML states the defaults"
        )


def test_unknown_name_lists_what_exists_and_guesses() -> None:
    with pytest.raises(UnknownPart) as caught:
        part.load("kv", "pagd")
    assert str(caught.value) == "no kv named 'pagd'; there are: contiguous, paged; did you mean 'paged'?"


def test_configuration_is_closed_and_frozen() -> None:
    config = part.load("provider", "local").Config(kind="local")
    with pytest.raises(ValidationError, match="surprise"):
        type(config)(kind="local", surprise=1)
    with pytest.raises(ValidationError, match="frozen"):
        config.kind = "other"


def test_other_distributions_add_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = EntryPoint("sampling.mine", "astrai_runtime.sampling.top_k", part.ENTRY_POINTS)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: EntryPoints([mine]))
    assert "mine" in part.names("sampling")
    assert part.load("sampling", "mine").__name__ == "TopK"
    assert "mine" not in part.names("kv")


def test_choices_load_without_torch() -> None:
    code = (
        "import sys\nfrom astrai_runtime import part\n"
        f"for group in {CLASS_GROUPS!r}:\n    for name in part.names(group): part.load(group, name)\n"
        "found = {'torch', 'litestar', 'transformers'} & set(sys.modules)\nassert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
