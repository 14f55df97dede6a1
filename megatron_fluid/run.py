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
        SystemExit: after --help, if no script is named or it does not exist, if a --fluid-* flag
            is wrong, or what the script raises.
    """
    usage = "usage: python -m megatron_fluid.run SCRIPT [ITS FLAGS]"
    if words and words[0] in ("-h", "--help"):
        print(f"{usage}\n\n{__doc__}")
        raise SystemExit(0)
    if not words or not Path(words[0]).is_file():
        problem = f"there is no file {words[0]}" if words else "no script is named"
        raise SystemExit(f"megatron_fluid.run: {problem}; {usage}")
    import megatron_fluid  # noqa: F401 (arms the patches; `-m` has done so already)
    from megatron_fluid.patches.arguments import check_flags

    check_flags(words[1:], Path(words[0]).name)

    sys.argv = list(words)
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1:])
