"""What the tests of models share: checkpoints of every entry of MODELS, their right logits, and the compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.conftest import isa, library, library_path, pool
from tests.model.checkpoints import MODELS, reference, write_hf
from tests.model.running import TOKENS

__all__ = ["isa", "library", "library_path", "pool"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders by name."""
    return {name: write_hf(name, tmp_path_factory.mktemp(name)) for name in MODELS}


@pytest.fixture(scope="session")
def expected() -> dict[str, torch.Tensor]:
    """transformers' logits at every position of TOKENS, [T, V], by name."""
    with torch.no_grad():
        return {name: reference(name)(torch.tensor([TOKENS])).logits[0] for name in MODELS}
