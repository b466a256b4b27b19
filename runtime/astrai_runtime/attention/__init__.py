"""Attention over a KVView, by whoever can do it on this machine."""
