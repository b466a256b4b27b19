"""Where each running sequence keeps its keys and values."""
