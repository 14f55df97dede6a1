"""The table of patches against the Megatron-Core that is installed. Each case is a fresh process:
Megatron is imported anew."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_fluid import patches
from megatron_fluid.patches.engine import signatures
from tests.support.fresh_program import run_code
from tools.versions import signature_in_source

pytestmark = pytest.mark.skipif(
    not patches.megatron_installed(), reason="megatron-core is not installed"
)


def run_python(code: str, *argv: str, expect: int = 0, **environ: str) -> tuple[Any, str]:
    """Run code in a process that has not imported Megatron; returns what it printed as JSON on its
    last line (None if nothing), and stderr."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_FLUID")
    }
    code = f"import json, sys\n{code}"
    done = run_code(code, *argv, environment={**clean, **environ})
    assert done.returncode == expect, done.stdout + done.stderr
    last = done.stdout.strip().rpartition("\n")[2]
    return (json.loads(last) if last and expect == 0 else None), done.stderr


STATES = "print(json.dumps({row.patch: row.state for row in megatron_fluid.patches.report()}))"


def test_a_forward_that_somebody_replaced_before_the_import_is_kept_and_named() -> None:
    code = """
import functools
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer

def replaced(own):
    return functools.wraps(own)(lambda self, *args, **kwargs: own(self, *args, **kwargs))

mine = MoELayer.forward, RowParallelLinear.forward = tuple(
    replaced(kind.forward) for kind in (MoELayer, RowParallelLinear)
)
import megatron_fluid
found = MoELayer.forward, RowParallelLinear.forward
rows = {row.patch: [row.state, row.reason] for row in megatron_fluid.patches.report()}
print(json.dumps([found == mine, rows]))
"""
    (kept, rows), _ = run_python(code)
    left_out = [name for name, (state, _) in rows.items() if state == "misfit"]
    assert kept and left_out == ["moe-layer-init", "moe-layer", "row-parallel-linear"]
    assert rows["moe-layer"][1].startswith("MoELayer.forward was replaced by other code")


def test_every_patch_fits_and_revert_gives_back_the_very_objects() -> None:
    # Every object in every module of Megatron and in every class of them, and what the targets
    # hold, before and after.
    code = """
import importlib, inspect
import megatron_fluid.patches as p
from megatron_fluid.patches.engine.engine import own
p.revert()  # disarm: the imports below must find Megatron as it is
for patch in p.PATCHES:
    importlib.import_module(patch.module)
    importlib.import_module(patch.waits_for)

def target(patch):
    owner = sys.modules[patch.module]
    *parents, attribute = patch.target.partition(':')[2].split('.')
    for parent in parents:
        owner = getattr(owner, parent)
    return own(owner, attribute)

def snapshot():
    owners = {n: m for n, m in list(sys.modules.items()) if n.partition('.')[0] == 'megatron'}
    for name, module in list(owners.items()):
        for key, value in list(vars(module).items()):
            if inspect.isclass(value) and value.__module__ == name:
                owners[f'{name}:{key}'] = value
    held = {f'{o} {k}': v for o, owner in owners.items() for k, v in list(vars(owner).items())}
    return held | {f'target of {patch.name}': target(patch) for patch in p.PATCHES}

def changed(before, after):
    both = [k for k in before if k in after and '__warningregistry__' not in k]
    return sorted(k for k in both if before[k] is not after[k])

before = snapshot()
p.apply_all()
states = {row.patch: row.state for row in p.report()}
during = snapshot()
p.apply_all()
twice = changed(during, snapshot())
p.revert()
after = snapshot()
gone = sorted(before.keys() - after.keys())
print(json.dumps([states, changed(before, during), twice, changed(before, after), gone]))
"""
    (states, during, twice, after, gone), _ = run_python(code)
    assert set(states) == {patch.name for patch in patches.PATCHES}
    assert set(states.values()) <= {"applied", "not needed"}
    assert states["arguments"] == states["dataset-helpers"] == "applied"
    assert states["optimizer-step"] == states["optimizer-clipping"] == "not needed", "by default"
    assert {name for name, state in states.items() if state == "applied"} == {
        key.removeprefix("target of ") for key in during if key.startswith("target of ")
    }
    assert twice == after == gone == []


def test_signatures_in_the_source_are_those_of_the_imported_objects() -> None:
    wanted = [p for p in patches.PATCHES if p.signature and p.target.startswith("megatron.")]
    in_source = {p.name: signature_in_source(p.target) for p in wanted}
    assert {name for name, found in in_source.items() if found is not None} == {
        p.name for p in wanted
    }
    assert in_source == {p.name: signatures.parse(str(p.signature)) for p in wanted}


# Another version of megatron-core: the module that tells it is replaced before anything else is
# imported.
OTHER_VERSION = """
import importlib.util
path = importlib.util.find_spec('megatron.core').loader.path.replace('__init__', 'package_info')
spec = importlib.util.spec_from_file_location('megatron.core.package_info', path)
info = importlib.util.module_from_spec(spec)
spec.loader.exec_module(info)
info.__version__ = '0.21.0'
sys.modules['megatron.core.package_info'] = info
import megatron_fluid, megatron.core.datasets.utils
"""


@pytest.mark.parametrize("strict", [False, True])
def test_an_unsupported_megatron_is_left_alone_with_a_warning_or_if_strict_an_error(
    strict: bool,
) -> None:
    if strict:
        _, stderr = run_python(OTHER_VERSION, expect=1, MEGATRON_FLUID_STRICT="1")
    else:
        warned = "import warnings; warnings.simplefilter('always')" + OTHER_VERSION
        states, stderr = run_python(warned + STATES)
        assert set(states.values()) <= {"off", "not needed"}
        assert stderr.count("megatron_fluid is off") == 1
    for part in (
        "PatchError" if strict else "UserWarning",
        "0.21.0 found",
        ">=0.16,<0.21",
        "--fluid-allow-unsupported-megatron",
        "MEGATRON_FLUID=off",
    ):
        assert part in stderr


# They look at no argument.
PASS_THROUGH = (
    *("peer-watch", "startup-table", "profile-steps"),
    *("failed-waits-gradients", "failed-waits-graphed-step", "failed-waits-checkpoint"),
)


def test_every_patch_of_a_function_of_megatron_names_its_signature() -> None:
    for patch in patches.PATCHES:
        assert patch.reason, patch.name
        # Defaults, a flag and the name of an imported extension.
        data = ("__defaults__", ":_grad_accum_fusion_available", ":fused_weight_gradient_mlp_cuda")
        unchecked = patch.adds or patch.name in PASS_THROUGH or patch.target.endswith(data)
        of_a_function = patch.target.startswith("megatron.") and not unchecked
        assert patch.signature or not of_a_function, (
            f"{patch.name}: give the signature it was written for"
        )
        assert set(patch.requires) < {other.name for other in patches.PATCHES}


def test_make_runs_only_where_there_is_a_makefile(tmp_path: Path) -> None:
    # `make` is replaced by a program that leaves a trace; the Makefile is looked for where the
    # package says it lies.
    program, trace = tmp_path / "make", tmp_path / "ran"
    program.write_text(f"#!/bin/sh\ntouch {trace}\n")
    program.chmod(0o755)
    code = f"""
import megatron_fluid, megatron.core.datasets as package, pathlib
from megatron.core.datasets.utils import compile_helpers
compile_helpers()
before = pathlib.Path({str(trace)!r}).exists()
pathlib.Path({str(tmp_path / "Makefile")!r}).touch()
package.__path__.append({str(tmp_path)!r})
package.__spec__.submodule_search_locations = package.__path__
compile_helpers()
print(json.dumps([before, pathlib.Path({str(trace)!r}).exists()]))
"""
    assert run_python(code, PATH=f"{tmp_path}:{os.environ['PATH']}")[0] == [False, True]
