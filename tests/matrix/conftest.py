"""The compiled kernels for the native half of the matrix: the fixtures of tests/kernels."""

from tests.kernels.conftest import library, library_path

__all__ = ["library", "library_path"]
