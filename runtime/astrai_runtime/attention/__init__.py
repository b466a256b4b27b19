"""How attention is computed: one file for each backend. `attn_backend` requires one for the requests made inside it."""

from astrai_runtime.attention._select import ATTN_BACKEND, attn_backend, required_backend

__all__ = ["ATTN_BACKEND", "attn_backend", "required_backend"]
