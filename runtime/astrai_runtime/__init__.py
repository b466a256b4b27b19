"""The engine: KV, attention, models, sampling, scheduling, protocols and the HTTP server."""
