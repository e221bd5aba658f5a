"""Polls the version counter for watches, where the database does not announce the commits of other processes."""

import logging
from collections.abc import Callable

from keyloft import limits
from keyloft.core.waiting import Job
from keyloft.engines.watches.feed import ChangeFeed
from keyloft.errors import Closed, DatabaseError

logger = logging.getLogger(__name__)


class Poller:
    """Passes the version counter to a feed, while there are watches."""

    def __init__(self, feed: ChangeFeed, read_version: Callable[[], int | None]) -> None:
        """`read_version` returns the counter; None if reading it is not worth while now."""
        self._feed = feed
        self._read_version = read_version
        self._job: Job | None = None

    def start(self) -> None:
        """Begin to poll, unless that is under way; called for each new watch."""
        with self._feed.lock:
            if self._job is None or self._job.done():
                self._feed.waiting.start(self._poll(), "keyloft polls for watches", self._keep_job)

    def _keep_job(self, job: Job) -> None:
        self._job = job

    def stop(self) -> None:
        if self._job is not None:
            self._job.cancel()

    def goes_on(self) -> bool:
        """Whether there are watches; if not, the next watch starts another job."""
        with self._feed.lock:
            if self._feed.has_watches:
                return True
            self._job = None
            return False

    async def _poll(self) -> None:
        while self.goes_on():
            await self._feed.waiting.sleep(limits.WATCH_POLL_SECONDS)
            try:
                version = self._read_version()
            except Closed:
                return
            except DatabaseError as error:
                logger.warning("reading the version counter for watches failed, retrying: %s", error)
            else:
                if version is not None:
                    self._feed.observe(version)
