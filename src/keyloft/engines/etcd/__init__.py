"""The engine on an etcd cluster.

`engine` reads, commits and watches. `cluster` calls the members with the `messages` of etcd's API, `errors` explains
failures, and `transactions` builds requests. `layout` is the form of keys and values. `views` reads from one revision;
`reads`, `scans` and `log` answer from it. `writes` takes an engine's groups, and `group_commit` decides and writes one
of them; `drafts` holds what it writes, and `large_values` stores what does not fit into it. `row_cache` saves it reads.
Several processes write in the order of `writer_queue`; `followed_commits` reports to each what the others wrote, and
`following` reports commits to watches, both by a `counter_watch`. `setup`, `maintenance`, `snapshots`, `loads` and
`inspection` serve operators.
"""

import os

from keyloft.errors import CannotOpen

# gRPC's own support of forks starts threads in the child, which abort it before its exec: of 300 programs that were
# started beside a busy store 34 died. No store may be used after a fork anyway.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

try:
    import google.protobuf  # type: ignore[import-untyped,unused-ignore]  # noqa: F401
    import grpc  # type: ignore[import-untyped,unused-ignore]  # noqa: F401
except ModuleNotFoundError as error:
    raise CannotOpen('etcd needs grpcio and protobuf: run pip install ".[etcd]" in a clone of Keyloft') from error
