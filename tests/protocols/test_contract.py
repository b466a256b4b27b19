"""What every protocol owes, over the files of protocols/: a new one is tested the day it is born."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest

from astrai_runtime import part
from astrai_runtime.errors import AstraiError, InvalidRequest
from astrai_runtime.part import PartConfig
from astrai_runtime.protocols.base import Protocol, Served
from tests.protocols.conftest import make

NAMES = part.names("protocols")
SPOKEN = [
    (name, dialect)
    for name in NAMES
    for dialect in get_args(part.load("protocols", name).Config.model_fields["dialect"].annotation)
]


def test_shipped_protocols_are_found() -> None:
    assert {"openai", "anthropic"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_kind_is_the_file_name_and_yaml_states_the_defaults(name: str) -> None:
    protocol_class = part.load("protocols", name)
    assert issubclass(protocol_class, Protocol)
    assert issubclass(protocol_class.Config, PartConfig)
    assert get_args(protocol_class.Config.model_fields["kind"].annotation) == (name,)
    assert all(field.is_required() for field in protocol_class.Config.model_fields.values())


@pytest.mark.parametrize(("name", "dialect"), SPOKEN)
def test_endpoints_are_at_the_declared_path_with_fresh_ids(name: str, dialect: str) -> None:
    endpoints = make(name, dialect, "/v9/there").endpoints()
    assert endpoints[0].path == "/v9/there"
    for endpoint in endpoints:
        assert len({endpoint.new_id() for _ in range(100)}) == 100
        assert endpoint.request.model_json_schema()["type"] == "object"


@pytest.mark.parametrize(("name", "dialect"), SPOKEN)
def test_errors_are_replies_of_plain_data(name: str, dialect: str, served: Served) -> None:
    protocol = make(name, dialect)
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
