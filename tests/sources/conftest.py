"""A hub of the test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sources.standin import Hub, serving_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving_hub() as running:
        yield running
