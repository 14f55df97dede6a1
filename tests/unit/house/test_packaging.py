"""The sdist, the wheel that is built from it, both in clean environments, a bare source tree,
`make`'s search for a Python, and the metadata.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import megatron_fluid

ROOT = Path(__file__).resolve().parents[3]
MADE = (".git", ".venv", "runs", "compare", "build", "dist", "data", "*.egg-info")
CACHES = ("__pycache__", ".*_cache", ".hypothesis", "*.pyc")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]


def python(
    code: str, folder: Path, environment: dict[str, str] | None = None,
    program: str = sys.executable,
) -> str:  # fmt: skip
    """What code prints in a folder, where this package is found by its installation alone."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [program, "-P", "-c", code], cwd=folder, env=clean | (environment or {}),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree: a build must leave nothing in it."""
    folder = tmp_path_factory.mktemp("source") / "tree"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*MADE, *CACHES))
    return folder


@pytest.fixture(scope="module")
def sdist(source_copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, by the hook of the build backend that every build tool calls."""
    folder = tmp_path_factory.mktemp("sdist")
    backend = PYPROJECT["build-system"]["build-backend"]
    python(f"import {backend} as backend; backend.build_sdist({str(folder)!r})", source_copy)
    return next(folder.glob("megatron_fluid-*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `pip install` builds from the source archive; without a network, so with this
    environment's setuptools."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, *"-m pip wheel --no-deps --no-build-isolation -w".split()]
    done = subprocess.run([*command, str(folder), str(sdist)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("megatron_fluid-*.whl"))


def test_the_sdist_holds_the_whole_source_tree(sdist: Path, source_copy: Path) -> None:
    """So that its tests, examples and docs can be used, and a wheel built from it is the same."""
    with tarfile.open(sdist) as archive:
        held = {"/".join(Path(m.name).parts[1:]) for m in archive.getmembers() if m.isfile()}
    tree = {str(path.relative_to(source_copy)) for path in source_copy.rglob("*") if path.is_file()}
    tree = {path for path in tree if ".egg-info/" not in path}
    outside = {".gitignore", ".github/workflows/ci.yml"}
    assert tree - held <= outside
    made = {path for path in held - tree if "egg-info/" not in path}
    assert made == {"PKG-INFO", "setup.cfg"}


def test_a_package_index_gets_links_and_pictures_that_lead_somewhere(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        (info,) = [name for name in archive.getnames() if name.count("/") == 1 and "PKG-" in name]
        text = archive.extractfile(info).read().decode()  # type: ignore[union-attr]
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20 and all(link.startswith("https://") for link in links)
    assert "/raw/main/docs/speedup.svg" in text
    assert "Project-URL: Source, https://" in text


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path, source_copy: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    library = {
        str(path.relative_to(source_copy)) for path in (source_copy / "megatron_fluid").rglob("*.*")
    }
    suffixes = (".py", ".cu", ".cuh", ".json", ".pth", ".typed")
    library = {path for path in library if path.endswith(suffixes)}
    wing = {
        f"megatron_fluid/{path.relative_to(source_copy)}"
        for path in (source_copy / "patches").rglob("*.py")
    }
    assert held == library | wing | {"megatron_fluid.pth"}
    assert {"megatron_fluid/tensor_parallel/measured.json", "megatron_fluid/py.typed"} <= held
    top = {name.partition("/")[0] for name in held}
    assert top == {"megatron_fluid", "megatron_fluid.pth"}, "patches/ goes inside"


def test_it_is_installed_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """By a wheel that pip built from the sdist, as it does before it installs one. Only its
    dependencies are this environment's: they are gigabytes."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    interpreter = str(environment / "bin" / "python")
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    command = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-deps"]
    command += ["--no-build-isolation", "--quiet", "--ignore-installed"]
    subprocess.run([*command, str(wheel)], check=True)
    code = (
        "import megatron_fluid, megatron_fluid.patches as p\n"
        "import megatron_fluid.patches.engine.engine as e\n"
        "from megatron_fluid.cli import main\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('patches') is None\n"
        "print(megatron_fluid.__file__, p.__file__, e.__file__, sep='\\n')\n"
        "raise SystemExit(main(['patches']))"
    )
    files = python(code, tmp_path, program=interpreter).splitlines()[:3]
    assert all(Path(file).is_relative_to(site) for file in files)
    program = [str(environment / "bin" / "megatron-fluid"), "--version"]
    said = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path).stdout
    assert said.split() == [megatron_fluid.__version__]


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_a_wheel_imports_itself_at_start_only_if_a_variable_asks(
    wheel: Path, tmp_path: Path, value: str | None
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import site, sys; site.addsitedir('.'); m = sys.modules.get('megatron_fluid'); "
    asked = {} if value is None else {"MEGATRON_FLUID_AUTOLOAD": value}
    found = python(code + "print(m and m.__file__)", tmp_path, asked)
    assert found.startswith(str(tmp_path) if value == "1" else "None")


def test_a_wheel_is_imported_without_being_unpacked(wheel: Path, tmp_path: Path) -> None:
    """With the sources of its kernels, and the table that it reads."""
    code = (
        "import megatron_fluid.patches as p, megatron_fluid.kernels.sm90.launch as k\n"
        "from megatron_fluid.kernels.grouped_gemm.launch import GROUPED\n"
        "from megatron_fluid.tensor_parallel.choice import read_table\n"
        "print(p.__file__, len(k.HEADER.read_text()) > 0 < len(GROUPED.path.read_text()))\n"
        "print(len(read_table()) > 0)"
    )
    inside = wheel / "megatron_fluid" / "patches" / "__init__.py"
    said = python(code, tmp_path, {"PYTHONPATH": str(wheel)})
    assert said.split() == [str(inside), "True", "True"]


def test_the_version_is_that_of_the_changelog() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", megatron_fluid.__version__)
    released = re.findall(r"^## \[(\d[\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[0] == megatron_fluid.__version__


def test_every_extra_that_a_page_or_a_script_names_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / ".ci").iterdir()]
    pages += (ROOT / "megatron_fluid/cli").glob("*.py")
    text = "\n".join(page.read_text() for page in pages)
    found = re.findall(r"(?:'\.|megatron[-_]fluid)\[([a-z, ]+)\]", text)
    named = {name.strip() for names in found for name in names.split(",")}
    assert {"megatron", "dev"} <= named <= set(EXTRAS)


def test_the_table_of_versions_says_what_is_required_and_what_was_tested() -> None:
    """docs/install.md beside pyproject.toml, CI's pins, and what results were measured with."""
    rows = re.findall(
        r"^\| ([^|]+?) \| ([^|]+?) \| ([^|]+?) \|$", (ROOT / "docs/install.md").read_text(), re.M
    )
    table = {name: (supported, tested) for name, supported, tested in rows}
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / ".ci/constraints.txt").read_text(), re.M))
    wanted = [*PROJECT["dependencies"], *EXTRAS["megatron"][:1], *EXTRAS["te"]]
    forms = (re.fullmatch(r"([\w-]+)(?:\[\w+\])?(\S+?)(?:;.*)?", line) for line in wanted)
    required = {form[1]: form[2] for form in forms if form is not None}
    assert required.keys() == {"torch", "triton", "wrapt", "megatron-core", "transformer-engine"}
    for name, versions in required.items():
        supported, tested = table[name]
        assert supported == f"`{versions}`"
        if name in pins:
            assert tested == pins[name]
    results = (path.read_text() for path in (ROOT / "benchmarks/results").rglob("*.json"))
    measured = {v for text in results for v in re.findall(r'"transformer_engine": "([^"]+)"', text)}
    assert table["transformer-engine"][1] in measured
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert table["Python"][0] == ", ".join(pythons)


def run_environment(home: Path) -> subprocess.CompletedProcess[str]:
    """Run make's search for a Python where the PATH holds none, with a home of one's own."""
    tools = home / "tools"
    tools.mkdir()
    for tool in ("sh", "dirname", "mkdir", "cp"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    command = [str(tools / "sh"), str(ROOT / ".ci/environment.sh"), str(home / "venv")]
    return subprocess.run(
        command, env={"PATH": str(tools), "HOME": str(home)}, capture_output=True, text=True
    )


def test_without_a_python_make_says_so_in_one_line(tmp_path: Path) -> None:
    done = run_environment(tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"No Python 3\.12 .*pyenv install 3\.12\n", done.stderr)


# Stands in for a Python: it is new enough, makes an environment of itself, and says what it is
# asked to install.
STAND_IN = """#!/bin/sh
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    *"pip install"*) echo "$*" ;;
esac
"""


def test_make_finds_a_python_that_pyenv_holds_but_does_not_activate(tmp_path: Path) -> None:
    broken = "#!/bin/sh\nexit 1\n"
    for version, program in {"3.12.1": broken, "3.12.9": STAND_IN, "3.13.0": STAND_IN}.items():
        file = tmp_path / f".pyenv/versions/{version}/bin/python3"
        file.parent.mkdir(parents=True)
        file.write_text(program)
        file.chmod(0o755)
    done = run_environment(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "versions/3.12.9/bin/python3" in done.stdout
    assert "--editable .[megatron,dev]" in done.stdout


def test_make_can_use_an_environment_of_ones_own() -> None:
    done = subprocess.run(
        ["make", "-n", "test", "PYTHON=python3"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "environment.sh" not in done.stdout
    assert "python3 -m pytest" in done.stdout


def test_benchmarks_start_from_the_root_too() -> None:
    done = subprocess.run([str(ROOT / "launch.sh")], cwd="/", capture_output=True, text=True)
    assert done.returncode == 2 and "test_ag_kernel" in done.stdout


def test_ci_runs_the_readmes_test_command() -> None:
    assert "exec make test\n" in (ROOT / ".ci/run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()
