"""The example plugins, played for real: each in a process of its own, with a service that is killed under them."""
