"""The engine on an SQLite file."""
