"""How a process that has moved bytes ends."""

import subprocess
import sys

# A thread that waits for the interpreter's lock when the program is over; nothing but what happens
# at the end gives it away.
_PROGRAM = """
import os, sys, threading
import megatron_fluid.comm
megatron_fluid.comm._MOMENT_S = 3.0

def late():
    gate.acquire()
    os.write(1, b"let go")

sys.setswitchinterval(1000)
gate = threading.Lock()
gate.acquire()
thread = threading.Thread(target=late, daemon=True)
thread.start()
{before}
gate.release()
"""


def _said(before: str) -> str:
    program = [sys.executable, "-c", _PROGRAM.format(before=before)]
    done = subprocess.run(program, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_a_thread_that_needs_the_interpreter_once_more_gets_it_before_the_end() -> None:
    assert _said("") == "let go"
    undo = "import atexit; atexit.unregister(megatron_fluid.comm._let_gloo_finish)"
    assert _said(undo) == "", "this test cannot fail"
