"""From one declared configuration to a running language-model service."""

__version__ = "0.1.0"
