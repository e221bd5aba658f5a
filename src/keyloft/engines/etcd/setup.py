"""Makes a store at a prefix, or checks that there is one."""

import secrets

from keyloft.core.maintenance import LogRow
from keyloft.core.schema import VERSION_BY_HAND
from keyloft.engines import change_log
from keyloft.engines.etcd import layout, transactions
from keyloft.engines.etcd.layout import StoreState
from keyloft.engines.etcd.views import RevisionViews
from keyloft.errors import NotADatabase


async def make_store(views: RevisionViews) -> None:
    """Make the store if there is none at the prefix, and check that it can be used.

    Raises:
        DatabaseError: It can't be used; the message says why.
    """
    cluster, keys = views.cluster, views.keys
    await cluster.check_members()
    counter = StoreState(store_id=secrets.token_hex(16))
    row = LogRow(VERSION_BY_HAND, 0, -1, 0, 0, change_log.EMPTY)
    made = [
        transactions.put(keys.counter, layout.pack_state(counter)),
        transactions.put(keys.log(VERSION_BY_HAND), layout.pack_log_row(row, layout.NO_COMMIT)),
    ]
    # Of several processes that do so at once, one makes it.
    await cluster.ask("Txn", transactions.transaction([transactions.is_unchanged(keys.counter, 0)], made))
    await views.fetch()


async def check_store(views: RevisionViews) -> None:
    """Check that there is a store at the prefix, and that it can be used.

    Raises:
        NotADatabase: There is none.
        DatabaseError: It can't be used; the message says why.
    """
    cluster, keys = views.cluster, views.keys
    await cluster.check_members()
    reply = await cluster.ask("Txn", transactions.transaction((), [transactions.read(keys.counter)]))
    if not transactions.replies(reply)[0].kvs:
        raise NotADatabase(f"{cluster.name}: there is no store of Keyloft at this prefix")
    await views.fetch()
