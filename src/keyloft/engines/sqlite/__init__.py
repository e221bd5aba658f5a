"""An engine on an SQLite file.

`engine` reads and commits, `reads` and `writes` hold the statements' use, `tables` the SQL; `file` opens connections,
`errors` explains failures such as a full disk, `wal` checkpoints the write-ahead log, `maintenance` serves operators.
"""
