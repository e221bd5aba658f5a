"""Services that answer over NATS, each in a process of its own."""
