"""The pieces of CPU mode alone: devices, events, random numbers, settings; and that a GPU run sees
none of it."""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_fluid import patches
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.cpu import arguments as cpu_arguments
from megatron_fluid.patches.cpu import device as cpu_device
from megatron_fluid.patches.cpu import replacements
from tests.support.fresh_program import run_code

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
megatron = pytest.mark.skipif(
    not patches.megatron_installed(), reason="megatron-core is not installed"
)


@pytest.fixture(autouse=True)
def switches_as_they_were() -> Iterator[None]:
    """Each test starts with both switches off, also where another test module has imported Megatron
    and so put them on."""
    switches = cpu_device.switches
    was = switches.device_literals, switches.run_compiled_functions_eagerly
    switches.device_literals = switches.run_compiled_functions_eagerly = False
    yield
    switches.device_literals, switches.run_compiled_functions_eagerly = was


@pytest.fixture
def device_literals() -> None:
    cpu_device.switches.device_literals = True


@no_gpu
@pytest.mark.usefixtures("device_literals")
@pytest.mark.parametrize(
    "device", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1), 0]
)
def test_every_way_to_name_a_gpu_gives_the_cpu(device: Any) -> None:
    x = torch.zeros(2, device=device)
    assert x.device.type == "cpu"
    assert x.to(device) is x
    assert x.to(device=device) is x
    assert x.cuda(device) is x
    assert torch.empty_like(x, device=device).device.type == "cpu"
    assert torch.nn.Linear(2, 2, device="meta").to_empty(device=device).weight.device.type == "cpu"


@no_gpu
@pytest.mark.usefixtures("device_literals")
def test_what_names_no_gpu_is_left_alone() -> None:
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.zeros(2, dtype=torch.int8).to(torch.float64).dtype == torch.float64
    assert torch.zeros(2).pin_memory().tolist() == [0.0, 0.0]
    assert not torch.zeros(2, pin_memory=True).is_pinned()
    assert torch.zeros(2).type() == "torch.FloatTensor"  # else only to Megatron's optimizers
    with pytest.raises(NotImplementedError):
        torch.zeros(2, device="meta").cuda()


def test_a_context_of_a_stream_may_be_entered_again() -> None:
    """As Megatron's gradient reduction over several optimizer instances does."""
    context = cpu_device.stream(cpu_device.current_stream())
    for _ in range(2):
        with context, context:
            pass


@no_gpu
def test_the_mode_leaves_the_stack_from_under_others() -> None:
    cpu_device.switches.device_literals = True
    with torch.device("meta"):
        cpu_device.switches.device_literals = False
        assert torch.zeros(1).device.type == "meta"
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(1, device="cuda")
    assert torch.zeros(1).device.type == "cpu"


def test_a_mode_of_a_thread_that_ended_can_be_switched_off() -> None:
    def switch_on() -> None:
        cpu_device.switches.device_literals = True

    thread = threading.Thread(target=switch_on)
    thread.start()
    thread.join()
    cpu_device.switches.device_literals = False
    assert not cpu_device.switches.device_literals


def test_compiled_functions_run_as_written_and_are_compiled_again_after() -> None:
    compiled: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append("compiled")
        return graph.forward

    function = torch.compile(lambda x: x + 1, backend=backend)
    cpu_device.switches.run_compiled_functions_eagerly = True
    try:
        assert function(torch.zeros(1)).item() == 1.0
        assert compiled == []
    finally:
        cpu_device.switches.run_compiled_functions_eagerly = False
    assert function(torch.zeros(1)).item() == 1.0
    assert compiled == ["compiled"]


def test_what_it_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"fp8: found 'hybrid', allowed: None"):
        cpu_arguments.adapt_arguments(argparse.Namespace(fp8="hybrid"))
    with pytest.raises(ConfigError, match=r"optimizer_cpu_offload: found True, allowed: False"):
        cpu_arguments.adapt_arguments(argparse.Namespace(optimizer_cpu_offload=True))
    refuse = replacements.validate_yaml(lambda args, defaults: args)
    with pytest.raises(ConfigError, match="yaml_cfg: found 'model.yaml'"):
        refuse(argparse.Namespace(yaml_cfg="model.yaml"), {})


def _program(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a process that has not imported Megatron does, with these variables of ours alone."""
    clean = {name: v for name, v in os.environ.items() if not name.startswith("MEGATRON_FLUID")}
    return run_code(code, environment={**clean, **environment})


STATES = """
import json, torch
names = "Stream", "Event", "current_device", "synchronize"
real = {name: vars(torch.cuda)[name] for name in names}
%s
import megatron_fluid.patches, megatron.core
states = {row.state for row in megatron_fluid.patches.report() if row.group == "CPU mode"}
same = all(vars(torch.cuda)[name] is value for name, value in real.items())
modes = len(torch.overrides._get_current_function_mode_stack())
print(json.dumps([sorted(states), same, modes]))
"""


ASKED = {"MEGATRON_FLUID_CPU": "1"}
_GPU = "torch.cuda.is_available = lambda: True"
_FLAG = "import sys; sys.argv.append('--fluid-cpu')"
alone = (pytest.mark.slow, no_gpu)


@megatron
@pytest.mark.parametrize(("code", "environment", "applied"), [
    pytest.param(_GPU, ASKED, False, id="beside a GPU"),
    pytest.param("", {}, False, id="not asked for", marks=alone),
    pytest.param("", ASKED, True, id="by the variable", marks=alone),
    pytest.param(_FLAG, {}, True, id="by the flag", marks=alone),
    pytest.param("", {**ASKED, "MEGATRON_FLUID": "off"}, False, id="off"),
])  # fmt: skip
def test_it_is_applied_where_it_is_asked_for_and_there_is_no_gpu(
    code: str, environment: dict[str, str], applied: bool
) -> None:
    done = _program(STATES % code, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    states, same, modes = json.loads(done.stdout.strip().rpartition("\n")[2])
    assert ("applied" in states, not same, modes == 1) == (applied,) * 3
    # Rows that wait for modules of megatron.training, which is not imported here, stay armed.
    assert applied or set(states) <= {"not needed", "armed"} or states == ["off"]


@pytest.mark.slow
@megatron
@no_gpu
def test_without_it_megatrons_own_error_follows_a_line_about_the_flag() -> None:
    code = (
        "import megatron_fluid; from megatron.training.arguments import parse_args; parse_args();"
    )
    code += "from megatron.training.initialize import initialize_megatron; initialize_megatron()"
    said = _program(code).stderr
    assert "megatron_fluid: no GPU is found. --fluid-cpu (or MEGATRON_FLUID_CPU=1)" in said
    assert "AssertionError: Megatron requires CUDA." in said
    said = _program(code, MEGATRON_FLUID_CPU="1").stderr
    assert said.count("megatron_fluid: CPU mode, as --fluid-cpu or MEGATRON_FLUID_CPU asks") == 1
    assert "requires CUDA" not in said and "no GPU is found. --fluid-cpu" not in said


_FAULTS = """
import ctypes, resource
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: 2 MiB at once would be few faults
import megatron_fluid
from megatron_fluid.patches.cpu.mode import cpu_mode_active
import torch
assert cpu_mode_active()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(12 * 2**20) for _ in range(2)]  # more than glibc ever keeps by itself
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(15)))  # the first ones leave gaps of other sizes
"""


@no_gpu
@megatron
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_cpu_mode_keeps_the_memory_that_a_step_frees_for_the_next() -> None:
    def faults(**environment: str) -> int:
        ours = ("MEGATRON_FLUID", "MALLOC_", "GLIBC_")
        clean = {name: v for name, v in os.environ.items() if not name.startswith(ours)}
        command = [sys.executable, "-c", _FAULTS]  # a fork would have its parent's malloc
        done = subprocess.run(command, env=clean | environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert faults(MEGATRON_FLUID_CPU="1") < 1000
    users = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    assert faults(MEGATRON_FLUID_CPU="1", **users) > 8000
