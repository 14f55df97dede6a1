"""Which backend `auto` takes for a shape that nobody measured, and what it looks at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.kernels.fused_gemm import MOST_ROWS
from megatron_fluid.tensor_parallel import choice
from megatron_fluid.tensor_parallel.fused import FusedBackend
from megatron_fluid.tensor_parallel.gemm import Gemm


class _Fused:
    name = "fused"
    ranks = 2

    def __init__(self, full: bool, capturing: bool) -> None:
        self.full, self._driver = full, SimpleNamespace(capturing=lambda: capturing)

    why_not = FusedBackend.why_not
    serves = FusedBackend.serves

    def fills_waves(self, a: torch.Tensor, gemm: Gemm, m: int, operation: str) -> bool:
        assert m > 0 and operation == "gather"
        return self.full


def _chosen(
    monkeypatch: pytest.MonkeyPatch,
    a: torch.Tensor,
    gemm: Gemm,
    m: int,
    full: bool = True,
    hopper: bool = True,
    capturing: bool = False,
) -> str:
    backends = SimpleNamespace(
        **{name: SimpleNamespace(name=name) for name in ("collective", "copy_engine", "flagged")},
        fused=_Fused(full, capturing) if hopper else None,
        gpu="a GPU that nobody measured",
        why_not="",
    )
    monkeypatch.setattr(choice, "backends_of", lambda group: backends)
    group = cast("dist.ProcessGroup", SimpleNamespace(size=lambda: 2))
    return cast(Any, choice.backend_for("auto", group, "gather", gemm, m, a)).name


def _operands(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, Gemm]:
    return torch.zeros(8, 4096, dtype=dtype), Gemm(torch.zeros(4096, 4096, dtype=dtype), transpose_b=True)


def test_one_kernel_is_taken_where_it_is_worth_it_and_its_waves_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    a, gemm = _operands()
    assert _chosen(monkeypatch, a, gemm, 8192) == "fused"
    assert _chosen(monkeypatch, a, gemm, 8192, full=False) == "copy_engine"
    assert _chosen(monkeypatch, a, gemm, 8192, capturing=True) == "copy_engine"
    assert _chosen(monkeypatch, a, gemm, 2 * MOST_ROWS) == "fused"
    assert _chosen(monkeypatch, a, gemm, 2 * MOST_ROWS + 2) == "copy_engine", "a block has no more rows than words"
    assert _chosen(monkeypatch, a, gemm, 8192, hopper=False) == "copy_engine"
    assert _chosen(monkeypatch, a, gemm, 128) == "collective"


def test_what_its_kernel_cannot_multiply_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    a, gemm = _operands(torch.float32)
    assert _chosen(monkeypatch, a, gemm, 8192) == "copy_engine"
    a, gemm = _operands()
    odd = torch.zeros(8 * 4096 + 1, dtype=a.dtype)[1:].view(8, 4096)
    assert odd.data_ptr() % 16 and _chosen(monkeypatch, odd, gemm, 8192) == "copy_engine"
    wide = Gemm(gemm.b, True, bias=torch.zeros(4096))
    assert _chosen(monkeypatch, a, wide, 8192) == "copy_engine"


def test_megatrons_linears_ask_with_their_three_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_parallel = pytest.importorskip("megatron_fluid.patches.tensor_parallel")
    a, gemm = _operands()
    _chosen(monkeypatch, a, gemm, 8192)
    noted: list[str] = []
    monkeypatch.setattr(tensor_parallel, "note", lambda linear, on, reason: noted.append(reason))
    group = SimpleNamespace(size=lambda: 2)
    x = torch.zeros(4, 2, 4096, dtype=a.dtype)
    assert tensor_parallel.backend_of(None, group, "gather", 4096, gemm.b, x) == "auto" and noted == ["fused"]
    assert tensor_parallel.backend_of(None, group, "gather", 4096, gemm.b, x[0]) is None
