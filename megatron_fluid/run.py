"""Run an unchanged training script with `import megatron_fluid` done first.

    torchrun --nproc-per-node 8 -m megatron_fluid.run pretrain_gpt.py ...

The script sees what it would see if Python had started it: its own `sys.argv`, and its folder first
on `sys.path`.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["run"]


def run(words: Sequence[str]) -> None:
    """Run a script as `__main__`.

    Args:
        words: the script's path and its flags.

    Raises:
        SystemExit: no script is named, or there is no such file; also whatever the script raises.
    """
    if not words or not Path(words[0]).is_file():
        found = f"no file {words[0]}" if words else "no script"
        raise SystemExit(
            f"megatron_fluid.run: found {found}; "
            "usage: python -m megatron_fluid.run SCRIPT [ITS FLAGS]"
        )
    import megatron_fluid  # noqa: F401 (arms the patches; `-m` has done so already)

    sys.argv = list(words)
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1:])
