"""Run Python code in a process that has imported neither Megatron-Core nor this package, forked
from one that has imported torch. What an import imports, or a shell starts, is for `subprocess`."""

import functools
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.templates import Template, with_torch

# What takes long in an import of Megatron-Core and is not its own.
_THIRD_PARTIES = [
    *("torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.tensor"),
    *("torch.export", "triton.language", "wrapt"),
]


def run_code(
    code: str, *argv: str, environment: Mapping[str, str], timeout_s: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """What ``python -W ignore -c CODE ARGV...`` does under `environment`; functions that code
    registers for its exit are not called."""
    command = [sys.executable, "-W", "ignore", "-c", code, *argv]
    if os.path.exists("/dev/nvidiactl"):  # what torch has asked a GPU must not be forked
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s
        )
    with tempfile.TemporaryDirectory(prefix="code-") as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in said:
            path.touch()
        pipe, theirs = multiprocessing.Pipe(duplex=False)
        arguments = (code, argv, dict(environment), os.getcwd(), [str(path) for path in said])
        interpreted = environment.get("TRITON_INTERPRET", "0")  # Triton reads it as it is imported
        process = _server(interpreted).fork(_main, arguments, theirs)
        theirs.close()
        try:
            if not multiprocessing.connection.wait([pipe], timeout_s):  # readable once it has ended
                raise subprocess.TimeoutExpired(command, timeout_s)
            process.join()
        finally:
            process.kill()
            pipe.close()
        assert process.exitcode is not None
        output, errors = (path.read_text(errors="replace") for path in said)
    return subprocess.CompletedProcess(command, process.exitcode, output, errors)


@functools.cache
def _server(interpreted: str) -> Template:
    return Template(with_torch(), _THIRD_PARTIES, {"TRITON_INTERPRET": interpreted})


def _main(
    code: str, argv: tuple[str, ...], environment: Mapping[str, str], folder: str, said: list[str],
    pipe: multiprocessing.connection.Connection,
) -> None:  # fmt: skip
    """The life of the forked process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    sys.argv = ["-c", *argv]
    sys.path.insert(0, "")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    warnings.simplefilter("ignore")
    os._exit(exit_status(lambda: exec(compile(code, "<string>", "exec"), vars(main))))


def exit_status(program: Callable[[], object]) -> int:
    """The exit status of a program, which ends here as in an interpreter."""
    try:
        program()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (as an interpreter ends)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
