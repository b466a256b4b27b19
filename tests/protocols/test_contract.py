"""What every protocol owes, over the files of protocols/: a new one is tested the day it is born."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from astrai_runtime import part
from astrai_runtime.errors import AstraiError, InvalidRequest
from astrai_runtime.part import PartConfig
from astrai_runtime.protocols.base import Protocol, Served

CONF = Path(__file__).resolve().parent.parent.parent / "conf" / "protocols"
NAMES = part.names("protocols")


def declared(name: str) -> dict[str, Any]:
    """What the option file of a protocol declares."""
    (only,) = yaml.safe_load((CONF / f"{name}.yaml").read_text()).values()
    assert isinstance(only, dict)
    return only


def variants(name: str) -> list[tuple[str, dict[str, Any]]]:
    """The declared configuration, in each dialect if there are dialects."""
    dialect = part.load("protocols", name).Config.model_fields.get("dialect")
    return (
        [(name, declared(name) | {"dialect": one}) for one in get_args(dialect.annotation)]
        if dialect
        else [(name, declared(name))]
    )


SPOKEN = [variant for name in NAMES for variant in variants(name)]


def build(name: str, config: dict[str, Any]) -> Protocol:
    protocol_class = part.load("protocols", name)
    built: Protocol = protocol_class(protocol_class.Config.model_validate(config))
    return built


def test_shipped_protocols_are_found() -> None:
    assert {"openai", "anthropic"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_kind_is_the_file_name_and_yaml_states_the_defaults(name: str) -> None:
    protocol_class = part.load("protocols", name)
    assert issubclass(protocol_class, Protocol)
    assert issubclass(protocol_class.Config, PartConfig)
    assert get_args(protocol_class.Config.model_fields["kind"].annotation) == (name,)
    assert all(field.is_required() for field in protocol_class.Config.model_fields.values())


@pytest.mark.parametrize(("name", "config"), SPOKEN)
def test_endpoints_are_at_the_declared_path_with_fresh_ids(name: str, config: dict[str, Any]) -> None:
    endpoints = build(name, config | {"path": "/v9/there"}).endpoints()
    assert endpoints[0].path == "/v9/there"
    for endpoint in endpoints:
        assert len({endpoint.new_id() for _ in range(100)}) == 100
        assert endpoint.request.model_json_schema()["type"] == "object"


@pytest.mark.parametrize(("name", "config"), SPOKEN)
def test_routes_that_generate_nothing_have_paths_and_schemas_of_their_own(name: str, config: dict[str, Any]) -> None:
    protocol = build(name, config)
    paths = [route.path for route in (*protocol.endpoints(), *protocol.lookups())]
    assert len(set(paths)) == len(paths)
    for lookup in protocol.lookups():
        assert lookup.request.model_json_schema()["type"] == "object"


@pytest.mark.parametrize(("name", "config"), SPOKEN)
def test_errors_are_replies_of_plain_data(name: str, config: dict[str, Any], served: Served) -> None:
    protocol = build(name, config)
    for reply in (
        protocol.error(AstraiError("broken")),
        protocol.error(InvalidRequest("no", param="/x")),
        protocol.invalid([{"type": "json_invalid", "loc": (), "msg": "no JSON"}]),
    ):
        assert reply.status >= 400
        assert isinstance(reply.body, dict)
    assert protocol.models([served.model])["data"][0]["id"] == "tiny"
    assert protocol.models([])["data"] == []
    plain: Any = {"user-agent": "curl"}
    assert not protocol.speaks(plain)


def test_protocols_import_neither_torch_nor_litestar() -> None:
    lines = [f"import astrai_runtime.protocols.{name}" for name in NAMES]
    check = "import sys; assert not {'torch', 'litestar', 'uvicorn'} & set(sys.modules), 'too much was imported'"
    subprocess.run([sys.executable, "-c", "\n".join([*lines, check])], check=True, env={"PYTHONPATH": ":".join(sys.path)})
