"""Moving bytes: peer rounds, symmetric buffers, transports."""

import atexit
import time

_MOMENT_S = 0.02


@atexit.register
def _let_gloo_finish() -> None:
    """A thread of gloo's holds an operation's tensors a moment longer than who waited for it, and
    takes the interpreter's lock to let go of them. When the interpreter is ending that aborts the
    process ("terminate called without an active exception"). Whoever destroys the last reference to
    a group waits for its threads; layers and what they share may hold one to the end. So here is
    the moment, behind what is registered later to be done at the end.
    """
    time.sleep(_MOMENT_S)
