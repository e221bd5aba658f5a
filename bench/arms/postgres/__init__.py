"""Keyloft on PostgreSQL, and asyncpg used the ordinary way."""
