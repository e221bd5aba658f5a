"""Tells what a signal's handler raises in the middle of a call from what the call raises by itself."""

import threading
from collections.abc import Callable


def raised_by_a_handler(error: Exception, call: Callable[[], object]) -> bool:
    """Whether a signal's handler raised this, for example a TimeoutError for SIGALRM; it must reach the caller.

    The call, which may raise anything, is made again: by itself, it raises the same. Handlers run in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    try:
        call()
    except Exception as again:
        return type(again) is not type(error)
    return True
