"""Polls the version counter for watches, where the database does not announce the commits of other processes."""

import logging
from collections.abc import Callable
from time import monotonic

from keyloft import limits
from keyloft.core.waiting import Job
from keyloft.engines.watches.feed import ChangeFeed
from keyloft.errors import Closed, DatabaseError

logger = logging.getLogger(__name__)


class Poller:
    """Passes the version counter and the time to a feed, while there are watches."""

    def __init__(
        self,
        feed: ChangeFeed,
        read_version: Callable[[], int | None],
        read_time: Callable[[], int],
        check_place: Callable[[], None],
    ) -> None:
        """Poll for a feed.

        Args:
            feed: Follows the counter.
            read_version: Returns the counter; None if reading it is not worth while now.
            read_time: Returns the time of a read.
            check_place: Called once a second; raises DatabaseError if the path now names another database.
        """
        self._feed = feed
        self._read_version = read_version
        self._read_time = read_time
        self._check_place = check_place
        self._next_check = 0.0
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
                if (now := monotonic()) >= self._next_check:
                    self._next_check = now + limits.WATCH_CHECK_SECONDS
                    self._check_place()
            except DatabaseError as error:
                self._feed.fail(error)
                continue
            with self._feed.lock:
                self._feed.note_time(self._read_time())
            try:
                version = self._read_version()
            except Closed:
                return
            except DatabaseError as error:
                logger.warning("reading the version counter for watches failed, retrying: %s", error)
            else:
                if version is not None:
                    self._feed.observe(version)
