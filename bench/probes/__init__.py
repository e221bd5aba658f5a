"""Measurements that are not a race between stores: memory, disk, sweeps, growth, load, targets."""
