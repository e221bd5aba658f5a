"""Tells what a signal's handler raises in the middle of a call from what the call raises by itself."""

import threading
from collections.abc import Callable


def raised_by_a_handler(error: Exception, call: Callable[[], object]) -> bool:
    """Whether a signal's handler raised this, for example a TimeoutError for SIGALRM; it must reach the caller.

    The call, which may raise anything, is made again: by itself, it raises the same. Handlers run in the main thread.

    Raises:
        Exception: A handler raised it while the call was made again.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    again = _raised(call)
    if again is None or type(again) is type(error):
        return again is None
    if type(_raised(call)) is type(error):
        raise again
    return True


def _raised(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None
