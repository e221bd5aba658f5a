"""An engine on an SQLite file.

`engine` is the engine; `reads` and `writes` run the SQL that `tables` holds; `file` opens connections; `errors`
explains failures such as a full disk; `wal` checkpoints the write-ahead log; `maintenance` works on whole files.
"""
