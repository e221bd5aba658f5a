"""Puts a service together: opens the database, connects to NATS, and starts the services that answer there."""
