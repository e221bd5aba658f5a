"""What the services and clients on NATS share."""
