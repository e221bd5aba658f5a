"""What operators do with a whole database, for Python programs: save it, move it, check it, count it."""
