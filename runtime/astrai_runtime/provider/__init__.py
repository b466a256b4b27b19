"""Who computes: logits here, or text elsewhere."""
