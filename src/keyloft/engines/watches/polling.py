"""Polls the version counter for watches, where the database does not announce the commits of other processes."""

import logging
from collections.abc import Callable

from keyloft import limits
from keyloft.engines.watches.feed import ChangeFeed
from keyloft.errors import Closed, DatabaseError

logger = logging.getLogger(__name__)


async def poll(feed: ChangeFeed, read_version: Callable[[], int | None]) -> None:
    """Tell the feed where the version counter stands, while there are watches.

    Args:
        feed: Serves the watches.
        read_version: Reads the counter; None if that is not worth while now.
    """
    while feed.has_watches:
        await feed.waiting.sleep(limits.WATCH_POLL_SECONDS)
        try:
            version = read_version()
        except Closed:
            return
        except DatabaseError as error:
            logger.warning("reading the version counter for watches failed, retrying: %s", error)
        else:
            if version is not None:
                feed.observe(version)
