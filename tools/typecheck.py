"""Run mypy over the package as it is installed: with `patches/` as `megatron_fluid.patches`.

The two lie side by side in the source tree, which mypy cannot be told; so it is given a folder of
links that has them where an installed package has them. `python tools/typecheck.py [mypy options]`
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["typecheck"]

ROOT = Path(__file__).resolve().parent.parent


def typecheck(*options: str) -> subprocess.CompletedProcess[str]:
    """Run mypy; the result holds its exit status and what it said, with the paths of the source
    tree."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "megatron_fluid")
        package.mkdir()
        for path in (ROOT / "megatron_fluid").iterdir():
            if path.name != "__pycache__":
                (package / path.name).symlink_to(path)
        (package / "patches").symlink_to(ROOT / "patches")
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        command += ["--cache-dir", str(ROOT / ".mypy_cache"), *options, "-p", "megatron_fluid"]
        environment = {**os.environ, "MYPYPATH": folder}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    done.stdout = done.stdout.replace("megatron_fluid/patches/", "patches/")
    return done


if __name__ == "__main__":
    result = typecheck(*sys.argv[1:])
    print(result.stdout + result.stderr, end="")
    sys.exit(result.returncode)
