"""HTTP: the only place that knows Litestar."""
