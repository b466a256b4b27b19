"""Architectures as data, and the interpreter that runs them."""
