"""From a turn to a prompt."""
