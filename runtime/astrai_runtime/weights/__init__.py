"""From model files to named tensors."""
