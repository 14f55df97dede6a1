"""How benchmarks are started: options that would not be followed are refused by name, and the rank
is found under several launchers."""

import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness.launchers import detect_launch
from megatron_fluid.errors import ConfigError

MODES = "found 'nosuch', allowed: some of forward, train, comma-separated"


@pytest.mark.parametrize(("suite", "arguments", "words"), [
    ("attention", "--tiny --modes nosuch", f"argument --modes: {MODES}"),
    ("attention", "--tiny --fluid sm_push:1,nosuch:2", "argument --fluid: found 'nosuch'"),
    ("attention", "--tiny --fluid sm_push:0", "groups of 'sm_push:0': found '0', allowed: 1"),
    ("moe_layer", "--smoke --cases olmoe --iters 3", "--cases, --iters: allowed without --smo"),
    ("moe_layer", "--smoke --variants flood", "--variants: found 'flood', allowed: beginning"),
    ("all_to_all", "--cases r1-1 r1-", "argument --cases: found 'r1-', allowed: one of r1"),
    ("moe_layer", "--smoke --iters -2", "--iters: found '-2', allowed: 1 or more"),
    ("losses", "--smoke --seeds 0", "found 0, 500, allowed: 1 or more"),
])  # fmt: skip
def test_an_unknown_or_idle_option_is_refused(
    suite: str, arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"benchmarks.suites.{suite}").main(arguments.split())
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def environment(prefix: str = "", **variables: object) -> dict[str, str]:
    return {prefix + name: str(value) for name, value in variables.items()}


@pytest.mark.parametrize(("env", "named"), [
    (environment(RANK="x", WORLD_SIZE=2), "RANK"),
    (environment(RANK=2, WORLD_SIZE=2), "RANK"),
    (environment(NODE_RANK=0, WORLD_LOCAL_SIZE=8), "WORLD_SIZE"),
    (environment(NODE_RANK=2, WORLD_SIZE=16, WORLD_LOCAL_SIZE=8), "NODE_RANK"),
    (environment(NODE_RANK=0, WORLD_SIZE=16, WORLD_LOCAL_SIZE=8), "MASTER_ADDR"),
    (
        environment("OMPI_COMM_WORLD_", RANK=9, SIZE=16, LOCAL_SIZE=8),
        "MASTER_ADDR: not set, with 8 of 16 ranks on this node",
    ),
    (environment(PMI_RANK=0, PMI_SIZE=4, MPI_LOCALNRANKS=2), "MASTER_ADDR"),
])  # fmt: skip
def test_what_is_wrong_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        detect_launch(env)


ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("name", "ranks"), [("pictures", 1), ("pretrain", 1), ("test_ag_kernel", 2)]
)
def test_a_program_of_one_process_is_launched_once(name: str, ranks: int) -> None:
    """The Python that launch.sh starts only prints its arguments."""
    command = [str(ROOT / "benchmarks" / "launch.sh"), name, "--help"]
    environment = {**os.environ, "NPROC": "2", "PYTHON": "/bin/echo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    launched = f"-m torch.distributed.run --standalone --nproc_per_node {ranks}" in done.stdout
    assert launched is (ranks > 1), done.stdout
    assert re.search(rf"-m benchmarks\.(\w+\.)?{name} --help$", done.stdout.strip()), done.stdout
