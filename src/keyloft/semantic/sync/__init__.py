"""The semantic store without `await`: entries, locks, checkpoints, flags and audit for threads and scripts."""
