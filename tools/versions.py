"""Hold the patch table against several versions of Megatron-Core: `make test-versions`.

Wheels come from the package index into a cache folder and are unpacked there; each is put first on
PYTHONPATH. A checkout of Megatron-LM that MEGATRON_FLUID_MEGATRON_MAIN names is tried as well. For
each: the signatures of the table by source, one MoE layer against Megatron's own, and four training
steps with and without the package, on two CPU ranks. The results are written to RESULTS, from
which the table of docs/compatibility.md is made.
"""

from __future__ import annotations

import argparse
import ast
import importlib.machinery
import json
import os
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools" / "versions.json"
MINORS = ("0.16", "0.17", "0.18", "0.19")
MAIN = "MEGATRON_FLUID_MEGATRON_MAIN"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron_fluid" / "wheels"


def table() -> str:
    """The results as a table for docs/compatibility.md."""
    lines = [
        "| Megatron-Core | patches left out | layer | losses of 4 steps |",
        "| --- | --- | --- | --- |",
    ]
    for row in json.loads(RESULTS.read_text()).values():
        left = ", ".join(f"`{name}` ({why})" for name, why in sorted(row["misfits"].items()))
        gaps = f"{row['layer']:.0e} | {row['losses']:.0e}"
        lines.append(f"| {row['version']} | {left or 'none'} | {gaps} |")
    return "\n".join(lines)


def wheel_folder(minor: str) -> Path:
    """The unpacked wheel of a minor version, downloaded if it is not there."""
    folder = CACHE / minor
    if not (folder / "megatron").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        subprocess.run([*pip, "-d", str(folder), f"megatron-core=={minor}.*"], check=True)
        (wheel,) = folder.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
    return folder


def under(folder: Path, what: str, timeout_s: float = 600) -> Any:
    """What `python -m tools.versions --probe what` prints, with Megatron from `folder`."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tools.versions", "--probe", what],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": path, "MEGATRON_FLUID_CPU": "1", "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def signature_in_source(target: str) -> Any:
    """The parameters of "package.module:function" or "package.module:Class.method" as its source
    file defines it. Imports nothing.

    None if the source does not show them (inherited, made at run time, defined under a condition,
    no such file).
    """
    from megatron_fluid.patches.engine import signatures

    module, _, path = target.partition(":")
    file = _source_file(module)
    if file is None:
        return None
    body: Sequence[ast.stmt] = ast.parse(file.read_bytes()).body
    *classes, function = path.split(".")
    for name in classes:
        found = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
        body = found[-1].body if found else []
    plain = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
    ]
    if not plain:
        return None
    arguments = plain[-1].args  # without annotations and values of defaults, which are unknown here
    arguments.defaults = [ast.Constant(0) for _ in arguments.defaults]
    arguments.kw_defaults = [value and ast.Constant(0) for value in arguments.kw_defaults]
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return signatures.parse(f"({ast.unparse(arguments)})")


def _source_file(module: str) -> Path | None:
    """Where the import system would find the module's source. Does not import parent packages
    either."""
    search: Sequence[str] | None = sys.path
    origin: str | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), search)
        if spec is None:
            return None
        search, origin = spec.submodule_search_locations, spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _signatures() -> dict[str, Any]:
    """The rows of Megatron's training and core that do not fit the sources on the path, with why.
    Imports nothing of Megatron, whose packages import torch."""
    os.environ["MEGATRON_FLUID"] = "off"
    from megatron_fluid import patches
    from megatron_fluid.patches.engine import signatures

    info = _source_file("megatron.core.package_info")
    assert info is not None, "megatron-core is not installed"
    home = info.parents[2]
    misfits: dict[str, str] = {}
    for patch in patches.PATCHES:
        source = home.joinpath(*patch.module.split("."))
        in_megatron = patch.group == "Megatron" and not patch.adds
        if not in_megatron:
            continue
        if not (source.with_suffix(".py").is_file() or (source / "__init__.py").is_file()):
            misfits[patch.name] = "no such module"
        elif patch.signature is not None:
            found = signature_in_source(patch.target)
            if not signatures.fits(signatures.parse(patch.signature), found):
                misfits[patch.name] = f"found {signatures.describe(found)}"
    return {"version": runpy.run_path(str(info))["__version__"], "misfits": misfits}


def _ranks() -> dict[str, Any]:
    from tests.support.launch import run_ranks

    return run_ranks(_compare, 2, timeout_s=500)[0]


def _compare(rank: int, world_size: int) -> dict[str, Any]:
    """The largest relative differences of a layer and of the losses of a training."""
    import megatron.core
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    from megatron_fluid import patches

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 reads it where Transformer Engine is missing
    sizes = {"expert_model_parallel_size": world_size, "expert_tensor_parallel_size": 1}
    parallel_state.initialize_model_parallel(**sizes)
    patches.revert(*(p.name for p in patches.PATCHES if p.group == "Megatron"))
    stock_layer, stock_losses = _layer(rank), _losses(rank)
    patches.apply_all()
    ours_layer, ours_losses = _layer(rank), _losses(rank)
    gaps = [
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
        for a, b in zip(ours_layer, stock_layer, strict=True)
    ]
    losses = torch.tensor([ours_losses, stock_losses])
    states = {row.patch: row.state for row in patches.report() if row.group == "Megatron"}
    from megatron_fluid.patches.moe.layer import OverlappedLayer

    return {
        "file": megatron.core.__file__,
        "layer": max(gaps),
        "losses": float((losses[0] / losses[1] - 1).abs().max()),
        "overlapped": OverlappedLayer.__name__ in _PATHS,
        "states": states,
    }


_PATHS: set[str] = set()


def _config() -> Any:
    import torch
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64,
        num_moe_experts=4, moe_ffn_hidden_size=48, moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2,
        moe_token_dispatcher_type="alltoall", add_bias_linear=False, gated_linear_unit=True,
        activation_func=F.silu, transformer_impl="local", expert_model_parallel_size=2,
        expert_tensor_parallel_size=1, use_cpu_initialization=True, params_dtype=torch.float32,
        hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )  # fmt: skip


def _model() -> Any:
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    tensor_parallel.random.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    torch.manual_seed(1234)
    return GPTModel(
        config=_config(),
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False),
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type="rope",
    )


def _layer(rank: int) -> list[Any]:
    """Output and gradients of one MoE layer."""
    import torch

    layer = _model().decoder.layers[0].mlp
    x = torch.randn(5 + rank, 2, 32, generator=torch.Generator().manual_seed(rank))
    y = layer(x.requires_grad_())[0]
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def _losses(rank: int) -> list[float]:
    """Of four steps through Megatron's data parallelism and optimizer."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_fluid.patches.moe import layer as seam

    model = _model()
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(overlap_grad_reduce=True), model
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=5e-3), [ddp])
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    losses = []
    for step in range(4):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        tokens = torch.randint(
            0, 64, (2, 16), generator=torch.Generator().manual_seed(9 * step + rank)
        )
        positions = torch.arange(16).unsqueeze(0).expand(2, -1)
        loss = ddp(tokens, positions, mask, labels=(tokens * 5 + 1) % 64).float().mean()
        loss.backward()
        finalize_model_grads([ddp])
        optimizer.step()
        losses.append(float(loss))
    for layer in model.decoder.layers:
        decision = seam.DECISIONS.get(layer.mlp)
        _PATHS.add(type(getattr(decision, "path", None)).__name__)
    return losses


PROBES: dict[str, Callable[[], Any]] = {"signatures": _signatures, "ranks": _ranks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probe", choices=PROBES, help="print one result of the path's Megatron")
    parser.add_argument("--only", nargs="+", choices=[*MINORS, "main"])
    chosen = parser.parse_args()
    if chosen.probe:
        print(json.dumps(PROBES[chosen.probe]()))
        return 0
    rows: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    failed = False
    for name in chosen.only or (*MINORS, *(["main"] if MAIN in os.environ else [])):
        folder = Path(os.environ[MAIN]) if name == "main" else wheel_folder(name)
        row = {**under(folder, "signatures"), **under(folder, "ranks")}
        good = row["layer"] < 1e-5 and row["losses"] < 1e-5 and row["overlapped"]
        good = good and Path(row.pop("file")).is_relative_to(folder)
        states = row.pop("states")
        row["misfits"] |= {n: "left out" for n, s in states.items() if s == "misfit"} | row[
            "misfits"
        ]
        row["applied"] = sum(state == "applied" for state in states.values())
        rows[name], failed = row, failed or not good
        print(f"{name}: {'good' if good else 'FAILED'} {row}")
    RESULTS.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
