"""The compiled kernels for the tests of native decoders: the fixtures of tests/kernels."""

from tests.kernels.conftest import isa, library, library_path, pool

__all__ = ["isa", "library", "library_path", "pool"]
