"""README.md and docs/: generated tables are up to date, their Python runs, links lead somewhere,
the site is built strictly, and every command of the user's pages is run here or as ELSEWHERE says.
"""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.report import iterations
from benchmarks.report.tables import suite_page
from megatron_fluid import patches
from tests.support.forked_program import run_program
from tests.support.fresh_program import run_code
from tests.support.machine import GPUS
from tools.readme import PAGES, README, RESULT_PAGES, generated

ROOT = README.parent
USED = (
    "README.md", "docs/install.md", "docs/configuration.md", "docs/decoding.md",
    "docs/several_nodes.md", "docs/debugging.md", "docs/torch_training.md",
)  # fmt: skip


def blocks(*pages: str) -> list[tuple[str, str]]:
    """The blocks of bash and Python on some pages."""
    text = "\n".join((ROOT / page).read_text() for page in pages)
    return re.findall(r"```(bash|python)\n(.*?)```", text, flags=re.DOTALL)


BLOCKS = blocks(*USED)
COMMANDS = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines() if line]

NEEDS_MEGATRON = pytest.mark.skipif(
    not patches.megatron_installed(), reason="megatron-core is not installed"
)

# Commands that are run elsewhere: the file that does it, and words that it must hold for this to
# stay true.
ELSEWHERE = {
    "make test": (".ci/run", "exec make test"),
    "make test PYTHON=python3": ("tests/unit/house/test_packaging.py", '"test", "PYTHON=python3"'),
    "pip install '.[megatron]'": ("tests/unit/house/test_packaging.py", '"install", "--no-deps"'),
    "pip install -e '.[megatron,dev]'": (".ci/environment.sh", "--editable '.[megatron,dev]'"),
    'make pretrain ARGS="--text-path README.md patches --train-iters 50 --save runs/mine"': (
        "tests/distributed/test_pretrain_example.py",
        "--text-path",
    ),
    "megatron-fluid profile --compare --output compare": (
        "tests/unit/cli/test_cli.py",
        '"profile", "--compare", "--output"',
    ),
    "megatron-fluid compare megatron-fluid run --nproc-per-node 2 examples/pretrain_gpt_moe.py": (
        "tests/unit/cli/test_compare.py",
        '"examples/pretrain_gpt_moe.py"',
    ),
    "bash examples/recipes/olmoe_1b_7b.sh --smoke": (
        "tests/distributed/test_recipes.py",
        '"--smoke"',
    ),
    "torchrun --nproc-per-node 8 examples/pretrain_gpt_moe.py --save runs/mine "
    "--fluid-profile-steps 10:12": (
        "tests/distributed/test_megatron_training.py",
        "--fluid-profile-steps",
    ),
    "torchrun --nproc_per_node 4 examples/pretrain_gpt_moe.py": (  # `run` is torchrun
        "tests/distributed/test_pretrain_example.py",
        '"megatron_fluid.cli", "run"',
    ),
    "torchrun --nproc_per_node 4 tests/test_transformer_speedup.py": (
        "tests/test_transformer_speedup.py",
        "run_program(Path(__file__)",
    ),
}
ON_TORCH = (
    "torchrun --nproc_per_node 4 train.py --ep 2",
    "torchrun --nproc_per_node 2 train.py --ep 1",
)
ELSEWHERE |= dict.fromkeys(ON_TORCH, ("tests/distributed/test_readme.py", "in ON_TORCH"))
TWO_NODES = (
    "torchrun --nnodes 2 --nproc_per_node 8 --node_rank 0 --master_addr HOST --master_port 29500"
)
# Commands that nothing runs, and why.
NOT_RUN = {
    "make bench-hosts": "forty minutes as root; test_slow_wire.py runs its parts",
    "srun --nodes 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d "
    "--rdzv_endpoint HOST:29500 examples/pretrain_gpt_moe.py": "needs a batch system",
    "mpirun -np 2 -npernode 1 torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d "
    "--rdzv_endpoint HOST:29500 examples/pretrain_gpt_moe.py": "needs two hosts",
    f"{TWO_NODES} tests/test_transformer_speedup.py": "needs two hosts; "
    "test_launchers.py starts two nodes, and test_transformer_speedup.py this program",
    f"{TWO_NODES} examples/pretrain_gpt_moe.py": "needs two hosts; test_launchers.py starts two "
    "nodes, and test_pretrain_example.py this program",
}
# Commands that are run here as they stand.
PROGRAMS = [f"megatron-fluid {c}" for c in ("doctor", "doctor --require megatron", "patches")]
CORRECTNESS = "torchrun --nproc_per_node 4 tests/test_correctness.py"
SMALL = (
    "--train-iters 2 --eval-iters 1 --hidden-size 32 --seq-length 32 --micro-batch-size 1 "
    # The data and the run are kept out of the source tree.
    "--global-batch-size 4 --save {0}/run --text-path Makefile --text-cache {0}/text"
)
MAKE = ("make pretrain", 'make pretrain RANKS=2 ARGS="--help"')


def run(command: list[str], folder: Path = ROOT, **environ: str) -> str:
    """Run to success, from the source tree's root unless told otherwise; returns what it said."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def forked(text: str, folder: Path, ranks: int, *flags: str) -> str:
    """What a program of that text prints on some ranks, which are forked: a start of its own for
    each costs an import of torch."""
    program = folder / "program.py"
    program.write_text(text)
    code, output = run_program(program, ranks, flags, folder, {"OMP_NUM_THREADS": "1"})
    assert code == 0, output
    return output


def test_the_generated_parts_are_up_to_date() -> None:
    for page in PAGES:
        text = page.read_text()
        assert generated(text) == text, f"{page.name}: make readme writes it anew"
    assert iterations.FILE.read_text() == iterations.iterations(), "make readme writes it anew"
    for page, suite in RESULT_PAGES.items():
        assert page.read_text() == suite_page(suite), f"{page}: python -m tools.readme writes it"


def test_every_command_is_run_somewhere() -> None:
    assert COMMANDS
    assert set(COMMANDS) == {*ELSEWHERE, *NOT_RUN, *PROGRAMS, CORRECTNESS, *MAKE}
    for command, (file, words) in ELSEWHERE.items():
        assert words in (ROOT / file).read_text(), f"{command} is no longer run by {file}"


@pytest.mark.parametrize("command", PROGRAMS)
def test_program(command: str) -> None:
    _, *words = shlex.split(command)
    if "megatron" in words and not patches.megatron_installed():
        pytest.skip("megatron-core is not installed")
    code = "import runpy; runpy.run_module('megatron_fluid.cli', run_name='__main__')"
    done = run_code(code, *words, environment=os.environ)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_correctness_under_torchrun() -> None:
    program, *rest = shlex.split(CORRECTNESS)
    assert program == "torchrun"
    rest[rest.index("--nproc_per_node") + 1] = str(min(2, GPUS or 2))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    assert "all correct" in run([*launch, *rest], PYTHONPATH=str(ROOT))


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) < 120


def test_links_lead_somewhere() -> None:
    """Of README and the pages beside it; the site's own are checked by its strict build."""
    for page in (README, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        NO_MKDOCS_2_WARNING="1",
    )
    page = (tmp_path / "changelog" / "index.html").read_text()
    assert "Keep a Changelog" in page, "it is the file of the root"


def test_the_ten_lines_of_the_readme_run() -> None:
    [snippet] = (block for _, block in blocks("README.md") if "MoELayer" in block)
    done = run_code(snippet, environment=os.environ)
    assert re.search(r"loss 0\.\d+, \|dW1\| \d\.\d+", done.stdout), done.stderr


def test_the_snippet_on_plain_torch_runs(tmp_path: Path) -> None:
    snippet = next(
        block for _, block in blocks("docs/api.md") if block.count("init_process_group") == 1
    )
    lines = forked(snippet, tmp_path, 2)
    assert re.search(r"rank 0: loss 0\.\d+, \|dW1\| \d\.\d+", lines)


def test_the_snippet_for_decoding_runs(tmp_path: Path) -> None:
    [(_, snippet)] = blocks("docs/decoding.md")
    lines = forked(snippet, tmp_path, 2)
    assert "rank 1: torch.Size([16, 256])" in lines and "all-to-all over " in lines


def test_the_page_on_training_is_run_and_loads_on_other_ranks(tmp_path: Path) -> None:
    [program] = (block for kind, block in blocks("docs/torch_training.md") if kind == "python")
    first, second = ON_TORCH
    said = forked(program, tmp_path, 4, *shlex.split(first.partition("train.py")[2]))
    said += forked(program, tmp_path, 2, *shlex.split(second.partition("train.py")[2]))
    saved, loaded = re.findall(r"step 10: (?:saved by|loaded on) \d ranks, ep \d, loss (\S+)", said)
    assert 0 < float(saved) < 3.0, "log(32) is 3.47"
    assert float(loaded) == pytest.approx(float(saved), abs=2e-6)


def test_each_cell_of_the_page_on_composition_names_a_test() -> None:
    page = (ROOT / "docs" / "composition.md").read_text()
    tests = dict(re.findall(r"^(\d+)\. `(\S+)`$", page, flags=re.MULTILINE))
    rows = [line.split("|")[2:-1] for line in page.splitlines() if line.startswith("| ")][1:]
    cells = [cell.strip() for row in rows for cell in row]
    cited = [
        re.fullmatch(r"(?:yes|refused) \((\d+(?:, \d+)*)\)", cell)
        for cell in cells
        if cell not in ("", "n/a")
    ]
    assert all(cited), "a cell is yes, refused, n/a or empty"
    numbers = {number for match in cited if match for number in match[1].split(", ")}
    assert len(rows) > 15 and numbers == set(tests), cells
    for test in tests.values():
        file, name = test.split("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(), test


@NEEDS_MEGATRON
def test_the_snippets_under_megatron_run(tmp_path: Path) -> None:
    one_line = next(block for kind, block in blocks("README.md") if kind == "python")
    spec = next(block for kind, block in blocks("docs/configuration.md") if kind == "python")
    assert one_line == "import megatron_fluid\n"
    for words, small in (("num_layers=32", "num_layers=2"), ("hidden_size=4096", "hidden_size=64")):
        assert words in spec
        spec = spec.replace(words, small)
    check = textwrap.dedent("""
        from megatron_fluid.patches.layer_specs import FluidMoELayer
        print("layers:", sum(isinstance(module, FluidMoELayer) for module in model.modules()))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    """)
    assert "layers: 2" in forked(one_line + spec + check, tmp_path, 2)


@NEEDS_MEGATRON
@pytest.mark.parametrize(
    ("flags", "said"), [(SMALL, "run complete"), ("--help", "--fluid-moe-backend")]
)
def test_make_pretrain_trains(flags: str, said: str, tmp_path: Path) -> None:
    """What make starts is printed, and forked: test_pretrain_example.py starts it for real."""
    make = ["make", "-s", "pretrain", "PYTHON=/bin/echo", "RANKS=1"]
    words = run([*make, f"ARGS={flags.format(tmp_path)}"]).split()
    launcher = "-m megatron_fluid.cli run --nproc-per-node 1 examples/pretrain_gpt_moe.py"
    assert words[:6] == launcher.split()
    code, out = run_program(ROOT / words[5], 1, words[6:], ROOT, {})
    assert code == 0 and said in out, out
