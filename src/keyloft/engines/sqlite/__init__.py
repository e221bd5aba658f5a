"""An engine on an SQLite file.

`engine` is the engine; `reads` and `writes` run the SQL that `tables` holds; `connection` owns the connection that
writes; `commits` decides where a group is committed, `lone_callers` whether the event loop may wait for it; `file`
opens connections; `errors` explains failures such as a full disk; `wal` checkpoints the write-ahead log; `worker` is
the thread for what takes long; `maintenance` works on whole files; `blocking` is the engine for threads.
"""
