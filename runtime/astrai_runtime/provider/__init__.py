"""Who computes logits."""
