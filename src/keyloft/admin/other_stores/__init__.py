"""Reads the files of other stores: each module has `read`, which yields their entries."""
