"""Measures Keyloft against its peers: `scripts/bench`."""
