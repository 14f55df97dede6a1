#!/bin/sh
# Make a virtual environment with everything that training and the tests need: .ci/environment.sh FOLDER
set -eu
folder=$1
root=$(cd "$(dirname "$0")/.." && pwd)

# One for which megatron-core has a wheel, and which can make an environment (Debian packages venv by itself).
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in {(3, 12), (3, 13)})' >/dev/null 2>&1
}

# On the PATH first, then those that pyenv holds but does not activate.
find_python() {
    for name in python3.12 python3.13 python3 python; do
        if usable "$name"; then command -v "$name"; return; fi
    done
    for version in 3.12 3.13; do
        for candidate in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python3; do
            if usable "$candidate"; then echo "$candidate"; return; fi
        done
    done
    return 1
}

python=$(find_python) || {
    echo "No Python 3.12 or 3.13 that can make virtual environments was found; install one, for example with: pyenv install 3.12" >&2
    exit 1
}
echo "environment: $("$python" --version) of $python -> $folder"
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --constraint "$root/.ci/constraints.txt" setuptools
cd "$root"
"$folder/bin/python" -m pip install --no-compile --constraint .ci/constraints.txt --no-build-isolation --editable '.[megatron,dev]'
# On all cores, where pip takes one. Of transformers little is imported. What does not compile is no module of this Python: a template, say.
"$folder/bin/python" -W ignore -m compileall -q -j 0 -x /transformers/ "$folder/lib" >/dev/null || true
