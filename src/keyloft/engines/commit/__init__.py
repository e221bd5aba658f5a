"""How an engine commits: gathers batches into groups, decides each group, reports what became of it."""
