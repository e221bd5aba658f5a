"""What maintainers run; nothing of it is installed."""
