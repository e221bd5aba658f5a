"""How every engine commits: `batcher` gathers batches, `settle` decides a group, `outcomes` reports the result."""
