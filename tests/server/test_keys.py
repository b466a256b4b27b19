"""Who may call what: keys from the configuration and from a file, admin routes, and a walk over every route."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from astrai_runtime.server._keys import KeyFileError, Keyring
from astrai_runtime.server.config import is_loopback
from tests.server.conftest import PATHS, server_config

Serve = Callable[..., Any]
USER = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
ADMIN_ROUTES = {("GET", "/metrics"), ("PATCH", "/admin/scheduler")}


def routes_of(live: Any) -> list[tuple[str, str]]:
    """Every (method, path) that the application has, a value in place of each parameter."""
    routes = live.server._uvicorn.config.app.routes
    table = [(method, re.sub(r"\{[^}]*\}", "tiny", route.path)) for route in routes for method in sorted(route.methods)]
    assert ("POST", PATHS["openai"]) in table
    assert set(table) >= ADMIN_ROUTES
    return table


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_route_but_health_refuses_a_missing_and_a_wrong_key(serve: Serve) -> None:
    live = serve(api_keys=["s3cret"], admin_keys=["r00t"])
    for method, path in routes_of(live):
        for headers in ({}, bearer("wrong"), bearer("s3cre"), bearer("s3cret0"), {"x-api-key": "r00t "[:-2]}):
            reply = live.http.request(method, path, headers=headers)
            wanted = 200 if (method, path) == ("GET", "/health") else 401
            assert reply.status_code == wanted, (method, path, headers)


def test_an_api_key_opens_every_route_but_admin_ones(serve: Serve) -> None:
    live = serve(api_keys=["s3cret"], admin_keys=["r00t"])
    for method, path in routes_of(live):
        reply = live.http.request(method, path, headers=bearer("s3cret"))
        assert (reply.status_code == 403) == ((method, path) in ADMIN_ROUTES), (method, path)
        assert reply.status_code != 401, (method, path)
        assert live.http.request(method, path, headers=bearer("r00t")).status_code not in (401, 403), (method, path)
    refused = live.http.get("/metrics", headers=bearer("s3cret"))
    assert "server.admin_keys" in refused.json()["error"]["message"]


def test_admin_key_alone_leaves_the_other_routes_open(serve: Serve) -> None:
    live = serve(admin_keys=["r00t"])
    assert live.chat().status_code == 200
    assert live.http.get("/metrics").status_code == 401
    assert live.http.get("/metrics", headers=bearer("r00t")).status_code == 200


def test_without_admin_keys_admin_routes_answer_only_this_machine_itself(serve: Serve) -> None:
    live = serve()
    assert live.http.get("/metrics").status_code == 200
    for headers in (
        {"x-forwarded-for": "127.0.0.1"},  # through a proxy: whoever is behind it is not here
        {"forwarded": "for=127.0.0.1"},
        {"x-real-ip": "127.0.0.1"},
        {"via": "1.1 proxy"},
        {"host": "evil.example"},  # a page whose name was pointed here
        {"host": "127.0.0.1.evil.example:8000"},
    ):
        assert live.http.get("/metrics", headers=headers).status_code == 403, headers
        assert live.http.get("/stats", headers=headers).status_code == 200
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert live.http.get("/metrics", headers={"host": host}).status_code == 200


def test_forwarded_addresses_never_replace_the_socket_s(serve: Serve) -> None:
    live = serve(api_keys=["s3cret"])
    assert live.http.get("/metrics").status_code == 401
    assert live.http.get("/metrics", headers=bearer("s3cret")).status_code == 200
    spoofed = {**bearer("s3cret"), "x-forwarded-for": "203.0.113.9"}
    assert live.http.get("/metrics", headers=spoofed).status_code == 403


def test_keys_of_a_file_count_beside_the_declared_ones(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst-key   # alice\n\n  ключ\n", encoding="utf-8")
    file.chmod(0o600)
    with capture_logs() as logs:
        live = serve(api_keys=["declared"], api_key_file=str(file))
    assert not [entry for entry in logs if entry["event"] == "key_file_open_to_others"]
    for key in ("declared", "first-key", "ключ"):
        assert live.http.post(PATHS["openai"], json=USER, headers={"x-api-key": key.encode()}).status_code == 200
    for key in ("alice", "#", "# of the team"):
        assert live.http.post(PATHS["openai"], json=USER, headers={"x-api-key": key}).status_code == 401


def test_a_key_file_that_others_may_read_is_warned_about_without_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a-very-secret-key\n", encoding="utf-8")
    file.chmod(0o644)
    with capture_logs() as logs:
        Keyring(server_config(api_key_file=str(file)))
    (entry,) = [entry for entry in logs if entry["event"] == "key_file_open_to_others"]
    assert entry["would_help"] == f"chmod 600 {file}"
    assert "a-very-secret-key" not in repr(entry)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"", "holds no key"),
        (b"# nothing\n\n", "holds no key"),
        (b"good\ntwo words\n", "line 2: one key a line"),
        (b"\xff\xfe", "no UTF-8"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_refused(tmp_path: Path, text: bytes | None, said: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(KeyFileError, match=said) as caught:
        Keyring(server_config(api_key_file=str(file)))
    assert "two words" not in str(caught.value)
    with pytest.raises(KeyFileError, match="is no file of keys"):
        Keyring(server_config(api_key_file=str(tmp_path)))


@pytest.mark.parametrize("key", ["", " ", "two words", "tail ", "new\nline", "nul\0"])
def test_a_key_that_no_header_can_carry_is_refused_without_repeating_it(key: str) -> None:
    for field in ("api_keys", "admin_keys"):
        with pytest.raises(ValidationError, match="a key is one word"):
            server_config(**{field: [key]})


def test_key_ids_differ_and_hide_the_key() -> None:
    ring = Keyring(server_config(api_keys=["alpha", "beta"], admin_keys=["alpha-admin"]))
    callers = [ring.find(key) for key in (b"alpha", b"beta", b"alpha-admin")]
    ids = {caller.id for caller in callers if caller is not None and caller.id is not None}
    assert len(ids) == 3
    assert all(len(one) == 8 and "alpha" not in one for one in ids)
    assert ring.find(b"alph") is None


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.168.1.2", False),
        ("localhost.example", False),
        ("2130706433", False),
    ],
)
def test_loopback_is_this_machine_and_nothing_else(address: str, loopback: bool) -> None:
    assert is_loopback(address) == loopback
