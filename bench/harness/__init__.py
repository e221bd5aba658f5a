"""Runs arms in interleaved rounds, times them and compares what they reached."""
