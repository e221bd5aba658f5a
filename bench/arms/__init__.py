"""The stores that are measured: Keyloft, its peers, and the limits."""
