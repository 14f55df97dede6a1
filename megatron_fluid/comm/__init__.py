"""Communication: round-robin P2P exchange, symmetric memory, plain all-to-all, the watchdog."""

import atexit
import time

_MOMENT_S = 0.02


@atexit.register
def _let_gloo_finish() -> None:
    """Give gloo's threads time to release the tensors of finished operations.

    A gloo thread holds an operation's tensors a moment longer than the caller who waited, and takes
    the interpreter's lock to release them. While the interpreter is ending, that aborts the process
    ("terminate called without an active exception"). Destroying a group joins its threads, but
    layers and what they share may hold a group to the end. This runs after all handlers that are
    registered later.
    """
    time.sleep(_MOMENT_S)
