"""Grouped GEMMs of one rank's experts, by our own kernels and by torch, with row counts as random
routing makes them.

    NPROC=1 benchmarks/launch.sh grouped_gemm --output benchmarks/results/grouped_gemm.json
    TRITON_INTERPRET=1 NPROC=1 benchmarks/launch.sh grouped_gemm --smoke            (one tiny case,
    without a GPU)

One GPU; the rows that 4 ranks of 4096 tokens send to the first of them. Modes: fc1, fc2 and their
gradients by x (dgrad), `fc1 swiglu`, with its activation and probabilities, `wgrad` as a new bf16
tensor, `main_grad` added to fp32. Variants: `fluid`, ours; `torch`; both also with the same rows
spread evenly (`_even`: what uneven counts cost); for swiglu `fluid_unkept`, which does not write
the GEMM's own result, and `torch` and `fluid_two_kernels` with our activation kernel; for main_grad
`cublas`, an expert at a time. A case says what each result is off by against the first variant's,
relatively. `fluid_fp8` is ours of operands that were cast before. `deepgemm` and `deepgemm_fp8` are
DeepGEMM's, whose experts' rows begin at multiples of 128: it gets them so, and its rate counts the
rows that there are. `te` and `te_cutlass` are Transformer Engine's grouped GEMMs, by cuBLAS and
where NVTE_USE_CUTLASS_GROUPED_GEMM=1 by CUTLASS, `te_one_launch` those of one parameter for all
experts, one launch of cuBLAS 13.4 or newer. All calls are eager, and the host has a head start
(benchmarks/harness/timing.py).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.moe import (
    CASES,
    MoECase,
    router_logits,
    torch_grouped_matmul,
    torch_grouped_weight_grad,
)
from benchmarks.harness.options import chosen, need_gpu_or_smoke, refuse_ignored
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import layer_head_start_ms, measure
from megatron_fluid.backward.main_grad import add_product_to_main_grad
from megatron_fluid.cli.terminal import positive
from megatron_fluid.kernels.activation.kernel import fused_activation_forward
from megatron_fluid.kernels.fp8_casts.launch import cast_rows
from megatron_fluid.kernels.fp8_grouped_gemm.launch import (
    Fp8Matrices,
    fp8_device_reason,
    fp8_grouped_matmul,
)
from megatron_fluid.kernels.grouped_gemm.launch import (
    add_weight_grads,
    can_add_weight_grads,
    can_gate,
    gated_matmul,
    grouped_matmul,
    grouped_weight_grad,
    takes_main_grads,
)
from tests.support import fp8_reference as reference

__all__ = ["main"]

RANKS = 4


def _ends(case: MoECase, tokens: int, zipf: float, device: torch.device) -> list[int]:
    """Offsets of rank 0's experts after the routing of all ranks."""
    counts = torch.zeros(case.experts, dtype=torch.int64, device=device)
    for rank in range(RANKS):
        chosen = router_logits(case, tokens, zipf, 100 + rank, device).topk(case.top_k).indices
        counts += torch.bincount(chosen.flatten(), minlength=case.experts)
    return counts[: case.experts // RANKS].cumsum(0).tolist()


_Calls = dict[tuple[str, str], Callable[[], Tensor]]


def _te_calls(
    mode: str, a: Sequence[Tensor], b: Sequence[Tensor], out: Tensor, layout: str, **more: Any
) -> _Calls:
    """Transformer Engine's grouped GEMMs into `out`, if it is installed; `layout` as it names it: N
    and T of `a`, then of `b`."""
    if not out.is_cuda or importlib.util.find_spec("transformer_engine") is None:
        return {}
    multiply = importlib.import_module(
        "transformer_engine.pytorch.cpp_extensions"
    ).general_grouped_gemm
    single = more.pop("single_output", False)
    outs = [out] if single else list(out.unbind(0))
    given = {"layout": layout, "single_output": single, **more}

    def call(cutlass: str) -> Tensor:
        os.environ["NVTE_USE_CUTLASS_GROUPED_GEMM"] = cutlass  # read at every GEMM
        multiply(list(a), list(b), outs, [None] * len(a), out.dtype, **given)
        return out

    variants = {"te": "0", "te_cutlass": "1"}
    return {(mode, name): functools.partial(call, value) for name, value in variants.items()}


def _te_one_launch(
    mode: str, a: Tensor, b: Tensor, out: Tensor, layout: str, counts: list[int], **more: Any
) -> _Calls:
    """The same by cuBLAS in one launch, which reads the row counts on the GPU, if cuBLAS has it.
    Tensors [rows, n] are split by `counts`, those [El, m, n] are El matrices."""
    if not out.is_cuda or importlib.util.find_spec("transformer_engine") is None:
        return {}
    extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    tensors = importlib.import_module("transformer_engine.pytorch.tensor")
    sizes = torch.tensor(counts, device=out.device)
    begins = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))

    def grouped(tensor: Tensor) -> Any:
        shape, width = tensor.shape, tensor.shape[-1]
        split = {"first_dims": sizes, "tensor_offsets": begins * width}
        alike = {"shapes": [tuple(shape[1:])] * len(counts)}
        return tensors.GroupedTensorStorage(
            shape=(tensor.numel() // width, width), dtype=tensor.dtype, num_tensors=len(counts),
            data=tensor.reshape(-1), **(split if tensor.dim() == 2 else alike),
        )  # fmt: skip

    try:
        multiply = extensions.general_grouped_gemm_for_grouped_tensor
        operands = grouped(a), grouped(b), grouped(out)

        def call() -> Tensor:
            multiply(*operands, layout=layout, **more)
            return out

        call().zero_()
        torch.cuda.synchronize()
    except (AttributeError, RuntimeError) as error:  # an older Transformer Engine, or cuBLAS
        print(f"te_one_launch left out: {str(error).splitlines()[0]}", file=sys.stderr)
        return {}
    return {(mode, "te_one_launch"): call}


def _cast(w: Tensor) -> Fp8Matrices:
    """[El, J, K] in fp8, as a product with rows [N, K] reads it."""
    casts = [reference.cast_weights(w[e : e + 1]) for e in range(len(w))]  # not all of it in fp32
    return Fp8Matrices(*(torch.cat(parts) for parts in zip(*casts, strict=True)))


class _Experts:
    """The tensors of one case and the calls to measure, by (mode, variant); each returns its
    result."""

    def __init__(self, case: MoECase, ends: list[int], device: torch.device) -> None:
        self.ends, self.local, n = ends, len(ends), ends[-1]
        self.counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        self.places: dict[tuple[str, str], Tensor] = {}  # of rows in results that have gaps
        self.even_ends = [n // self.local * (e + 1) for e in range(self.local)]
        self.offsets, self.even = (
            torch.tensor(e, dtype=torch.int32, device=device) for e in (self.ends, self.even_ends)
        )
        # The interpreter multiplies no bf16.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype) * scale

        self.x, self.h, self.a = (
            random(n, case.hidden),
            random(n, 2 * case.ffn),
            random(n, case.ffn),
        )
        self.w1 = random(self.local, 2 * case.ffn, case.hidden, scale=0.02)
        self.w2 = random(self.local, case.hidden, case.ffn, scale=0.02)

    def _rivals(
        self, mode: str, x: Tensor, w: Tensor
    ) -> dict[tuple[str, str], Callable[[], Tensor]]:
        """DeepGEMM's products, if they can be made."""
        try:
            calls = self._deepgemm(mode, x, w)
            for call in calls.values():  # the first compiles it
                call()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"deepgemm left out: {type(error).__name__}: {error}", file=sys.stderr)
            return {}
        return calls

    def _deepgemm(
        self, mode: str, x: Tensor, w: Tensor
    ) -> dict[tuple[str, str], Callable[[], Tensor]]:
        """DeepGEMM's products of rows x [N, K] and w [El, J, K], in bf16 and in fp8."""
        library = importlib.import_module("deep_gemm")
        counts = self.counts
        room = [-(-count // 128) * 128 for count in counts]
        owners = torch.full((sum(room),), -1, dtype=torch.int32, device=x.device)
        places, start = [], 0
        for expert, (count, size) in enumerate(zip(counts, room, strict=True)):
            owners[start : start + count] = expert
            places.append(torch.arange(start, start + count, device=x.device))
            start += size
        rows, out = x.new_zeros(sum(room), x.shape[1]), x.new_empty(sum(room), w.shape[1])
        at = torch.cat(places)
        rows[at] = x
        cast = importlib.import_module("deep_gemm.utils")
        blocks = [cast.per_block_cast_to_fp8(each, use_ue8m0=False) for each in w]
        fp8 = cast.per_token_cast_to_fp8(rows, use_ue8m0=False)
        matrices = tuple(torch.stack(parts) for parts in zip(*blocks, strict=True))
        calls = {
            "deepgemm": (library.m_grouped_bf16_gemm_nt_contiguous, rows, w),
            "deepgemm_fp8": (library.m_grouped_fp8_gemm_nt_contiguous, fp8, matrices),
        }

        def product(call: Callable[..., None], left: Any, right: Any) -> Tensor:
            call(left, right, out, owners)
            return out

        self.places |= {(mode, name): at for name in calls}
        return {(mode, name): functools.partial(product, *parts) for name, parts in calls.items()}

    def products(self) -> dict[tuple[str, str], Callable[[], Tensor]]:
        found: dict[tuple[str, str], Callable[[], Tensor]] = {}

        fp8 = self.x.is_cuda and fp8_device_reason(self.x.device) is None

        def add(mode: str, x: Tensor, w: Tensor) -> None:
            for variant, multiply in (("torch", torch_grouped_matmul), ("fluid", grouped_matmul)):
                found[mode, variant] = lambda f=multiply: f(x, w, self.offsets, self.ends)
                found[mode, f"{variant}_even"] = lambda f=multiply: f(
                    x, w, self.even, self.even_ends
                )
            if fp8:
                rows, blocks = cast_rows(x), _cast(w.transpose(1, 2))
                found[mode, "fluid_fp8"] = lambda: fp8_grouped_matmul(rows, blocks, self.offsets)
            if x.is_cuda and importlib.util.find_spec("deep_gemm") is not None:
                found.update(self._rivals(mode, x, w.transpose(1, 2).contiguous()))
            transposed = w.transpose(1, 2).is_contiguous()
            matrices, layout = (w.transpose(1, 2), "TN") if transposed else (w, "NN")
            out, splits = x.new_empty(len(x), w.shape[2]), {"m_splits": self.counts}
            operands = matrices.unbind(0), x.split(self.counts), out
            found.update(_te_calls(mode, *operands, layout, single_output=True, **splits))
            found.update(_te_one_launch(mode, matrices, x, out, layout, self.counts))

        add("fc1", self.x, self.w1.transpose(1, 2))
        found |= self._swiglu()
        add("fc2", self.a, self.w2.transpose(1, 2))
        add("fc2 dgrad", self.x, self.w2)
        add("fc1 dgrad", self.h, self.w1)
        return found

    def _swiglu(self) -> dict[tuple[str, str], Callable[[], Tensor]]:
        weights, n, width = self.w1.transpose(1, 2), self.x.shape[0], self.a.shape[1]
        prob = torch.rand(n, device=self.x.device)
        if not can_gate(self.x, weights, prob, "swiglu"):
            return {}
        count = self.offsets[-1:].clone()

        def two(multiply: Callable[..., Tensor]) -> Tensor:
            h = multiply(self.x, weights, self.offsets, self.ends)
            return fused_activation_forward("swiglu", h, prob, count)

        def one(keep: bool) -> Tensor:
            out = self.x.new_empty(n, width)
            gated_matmul(self.x, weights, self.offsets, prob, out, keep, ends=self.ends)
            return out

        mode = "fc1 swiglu"
        return {
            (mode, "torch"): lambda: two(torch_grouped_matmul),
            (mode, "fluid_two_kernels"): lambda: two(grouped_matmul),
            (mode, "fluid"): lambda: one(True),
            (mode, "fluid_unkept"): lambda: one(False),
        }

    def gradients(self) -> dict[tuple[str, str], Callable[[], Tensor]]:
        found: dict[tuple[str, str], Callable[[], Tensor]] = {}
        for name, left, right in (("fc1", self.h, self.x), ("fc2", self.x, self.a)):
            main = torch.zeros(self.local, left.shape[1], right.shape[1], device=left.device)
            outputs = list(main.unbind(0))
            places = torch.tensor([g.data_ptr() for g in outputs], device=left.device)

            def product(
                f: Callable[..., Tensor], left: Tensor = left, right: Tensor = right
            ) -> Tensor:
                return f(left, right, self.offsets, self.ends)

            def cublas(left: Tensor = left, right: Tensor = right, main: Tensor = main) -> Tensor:
                start = 0
                for grad, end in zip(main.unbind(0), self.ends, strict=True):
                    add_product_to_main_grad(grad, left[start:end], right[start:end])
                    start = end
                return main

            def add(
                left: Tensor = left,
                right: Tensor = right,
                main: Tensor = main,
                outputs: list[Tensor] = outputs,
                places: Tensor = places,
            ) -> Tensor:
                add_weight_grads(left, right, self.offsets, places, outputs)
                return main

            found[f"{name} wgrad", "torch"] = lambda f=product: f(torch_grouped_weight_grad)
            found[f"{name} wgrad", "fluid"] = lambda f=product: f(grouped_weight_grad)
            found[f"{name} main_grad", "cublas"] = cublas
            if can_add_weight_grads(left, right) and takes_main_grads(outputs):
                found[f"{name} main_grad", "fluid"] = add
            rows = right.split(self.counts), left.split(self.counts)
            fresh, shared = torch.empty_like(main, dtype=left.dtype), {"m_splits": self.counts}
            found |= _te_calls(f"{name} wgrad", *rows, fresh, "NT", grad=True, **shared)
            shared |= {"grad": True, "accumulate": True}
            found |= _te_calls(f"{name} main_grad", *rows, main, "NT", **shared)
            for mode, out, more in (("wgrad", fresh, False), ("main_grad", main, True)):
                operands = f"{name} {mode}", right, left, out, "NT", self.counts
                found |= _te_one_launch(*operands, accumulate=more, use_split_accumulator=True)
        return found


def _check(
    calls: dict[tuple[str, str], Callable[[], Tensor]], places: dict[tuple[str, str], Tensor]
) -> dict[tuple[str, str], float]:
    """How far each result is from the first variant's of its mode."""
    right: dict[str, Tensor] = {}
    gaps = {}
    for (mode, variant), call in calls.items():
        # Variants share outputs: none may pass by another's result. main_grad is added to.
        call().fill_(0.0 if "main_grad" in mode else math.nan)
        result = call().float()
        if (mode, variant) in places:
            result = result[places[mode, variant]]
        if variant.endswith("_even"):
            continue
        base = right.setdefault(mode, result.clone())
        gaps[mode, variant] = float((result - base).norm() / base.norm())
    return gaps


def main(arguments: list[str] | None = None) -> int:
    """Measure and, on rank 0, print a table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a rank")
    parser.add_argument("--zipf", type=float, default=0.0)
    parser.add_argument("--iters", type=positive, default=10)
    parser.add_argument(
        "--skip-gradients", action="store_true", help="leave the weight gradients out"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="one tiny case, on a CPU with the interpreter"
    )
    parser.add_argument("--output", type=Path, default=None, help="result file")
    options = parser.parse_args(arguments)
    if options.smoke:
        refuse_ignored(parser, options, ("cases", "tokens", "iters"), "without --smoke")
    cases = {name: CASES[name] for name in chosen(parser, "--cases", options.cases, CASES)}
    need_gpu_or_smoke(parser, "grouped_gemm", options.smoke)
    device = (
        torch.device("cpu")
        if options.smoke
        else torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    )
    if options.smoke:
        cases, options.tokens, options.iters = {"smoke": MoECase(32, 16, 8, 2)}, 16, 1
    else:
        torch.cuda.set_device(device)
    rows: list[Row] = []
    for name, case in cases.items():
        experts = _Experts(case, _ends(case, options.tokens, options.zipf, device), device)
        calls = experts.products() | ({} if options.skip_gradients else experts.gradients())
        gaps = _check(calls, experts.places)
        head_start = layer_head_start_ms(device)
        named = {f"{m} {v}": c for (m, v), c in calls.items()}
        timings = measure(named, device, iters=options.iters, warmup=2, head_start_ms=head_start)
        n, flops = experts.ends[-1], 4.0 * experts.ends[-1] * case.hidden * case.ffn
        for (mode, variant), gap in ((key, gaps.get(key, 0.0)) for key in calls):
            timing = timings[f"{mode} {variant}"]
            rate = (flops if mode.startswith("fc1") else flops / 2) / timing.median_ms / 1e9
            config = {
                "rows": n,
                "zipf": options.zipf,
                "tflop_s": rate,
                "off_by": gap,
                "head_start_ms": head_start,
            }
            rows.append(timing.row(name, mode, variant, config))
            figures = f"{timing.median_ms * 1e3:9.1f} us {rate:7.0f} TFLOP/s  off by {gap:.1e}"
            print(f"{name:16} {mode:14} {variant:16} {figures}", flush=True)
        del experts, calls
        if options.output is not None:
            write_results("grouped_gemm", rows, 1, options.output)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
