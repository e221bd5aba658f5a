"""The engine on SQLite for threads: every call runs on the caller's thread, and no event loop takes part (ADR 18)."""
