"""Renders what was measured: at the terminal, as JSON, as Markdown pages and as charts."""
