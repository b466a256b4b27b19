"""A model without files: only providers that need none can serve it."""

from __future__ import annotations

from pathlib import Path

import pytest

from astrai_runtime.errors import SourceError
from astrai_runtime.sources.none import PART


def test_whoever_needs_files_is_told_what_would_work(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="provider=mock or provider=remote, or a model with files"):
        PART(PART.Config(kind="none")).locate(cache=tmp_path, offline=True, fetch=False)
