"""How every engine commits: `groups` gathers batches, `settle` decides a group, `outcomes` reports the result."""
