"""Nothing waits in the kernel: small answers on a connection that stays open go out at once."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any


def test_accepted_connections_send_without_delay(serve: Callable[..., Any]) -> None:
    live = serve()
    assert live.http.get("/health").status_code == 200
    accepted = [connection.transport for connection in live.server._uvicorn.server_state.connections]
    assert accepted
    for transport in accepted:
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
