"""Wire formats: JSON and server-sent events of public APIs."""
