"""The command `doctor`, and what it examines: the host, the database, NATS and HTTP."""
