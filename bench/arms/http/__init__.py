"""Servers that take part in `scripts/bench http`."""
