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
echo "environment: $("$python" --version) of $python -> $folder; about 6 GB are installed, which takes about two minutes"
"$python" -m venv "$folder"
cd "$root"
install() { "$folder/bin/python" -m pip install --no-compile --constraint .ci/constraints.txt "$@"; }
# pip takes one core, and torch with its libraries takes as long as all else: both at once, behind what both need. What fails here is
# tried again below, and says why.
install --quiet setuptools Jinja2 filelock fsspec typing_extensions
install --quiet torch 2>/dev/null &
install --quiet $(grep -Ev '^(#|torch=|triton=|megatron-core=)' .ci/constraints.txt) 2>/dev/null || true
wait
install --no-build-isolation --editable '.[megatron,dev]'
# On all cores, where pip takes one. Not what is seldom imported. What does not compile is no module of this Python: a template, say.
seldom='/(transformers|sympy|networkx|matplotlib|fontTools|mypy|mypyc|pygments|babel|mkdocs|material|tensorboard|huggingface_hub|tests|testing)/'
"$folder/bin/python" -W ignore -m compileall -q -j 0 -x "$seldom" "$folder/lib" >/dev/null || true
