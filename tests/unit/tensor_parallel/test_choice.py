"""Which backend `auto` takes: for a measured shape and its neighbours, and for others."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.kernels.fused_gemm.launch import MOST_ROWS
from megatron_fluid.tensor_parallel import choice, collective, ops
from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
from megatron_fluid.tensor_parallel.fused import FusedBackend
from megatron_fluid.tensor_parallel.gemm import Gemm


class _OnGpu(torch.Tensor):
    """In the memory of a CPU, and does not say so."""

    is_cuda = True


class _CopyEngine(CopyEngineBackend):
    def __init__(self) -> None:
        self._driver = cast(Any, SimpleNamespace(capturing=lambda: False))


class _Fused(FusedBackend):
    def __init__(self) -> None:
        self.ranks = 2


def _chosen(
    monkeypatch: pytest.MonkeyPatch, a: torch.Tensor, gemm: Gemm, m: int, hopper: bool = True
) -> str:
    backends = SimpleNamespace(
        collective=SimpleNamespace(name="collective"),
        copy_engine=_CopyEngine(),
        fused=_Fused() if hopper else None,
        gpu="a GPU that nobody measured",
        unsupported_reason=None,
    )
    monkeypatch.setattr(choice, "backends_of", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return choice.backend_for("auto", _group(), "gather", gemm, m, a).name


def _group(ranks: int = 2) -> dist.ProcessGroup:
    return cast("dist.ProcessGroup", SimpleNamespace(size=lambda: ranks, rank=lambda: 0))


def _operands(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, Gemm]:
    a = torch.zeros(8, 4096, dtype=dtype).as_subclass(_OnGpu)
    return a, Gemm(torch.zeros(4096, 4096, dtype=dtype), transpose_b=True)


@pytest.fixture
def nothing_symmetric(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(group: dist.ProcessGroup) -> None:
        raise AssertionError("symmetric memory would be made for nothing")

    monkeypatch.setattr(choice, "backends_of", refuse)
    served = SimpleNamespace(name="collective")
    monkeypatch.setattr(choice, "collective_of", lambda group: served)


def test_a_backend_is_taken_where_it_was_the_fastest_and_can_multiply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, gemm = _operands()
    odd = torch.zeros(8 * 4096 + 1, dtype=a.dtype)[1:].view(8, 4096).as_subclass(_OnGpu)
    assert odd.data_ptr() % 16
    for found, m, backend, hopper in (
        ((a, gemm), 8192, "fused", True),
        ((a, gemm), 8192, "copy_engine", False),
        ((a, gemm), 2 * MOST_ROWS, "fused", True),
        ((a, gemm), 2 * MOST_ROWS + 2, "copy_engine", True),  # a block has no more rows than words
        ((a, gemm), 128, "collective", True),
        ((odd, gemm), 8192, "copy_engine", True),
        ((a[:0], gemm), 8192, "copy_engine", True),
        (_operands(torch.float32), 8192, "copy_engine", True),
        (_operands(torch.float64), 8192, "collective", True),
    ):
        assert _chosen(monkeypatch, *found, m, hopper) == backend


def test_fp64_is_not_summed_in_fp32() -> None:
    with pytest.raises(ConfigError, match="found 'copy_engine'.*because it adds in fp32"):
        _CopyEngine().check(*_operands(torch.float64), 8192)
    _CopyEngine().check(*_operands(torch.float32), 8192)


@pytest.mark.usefixtures("nothing_symmetric")
def test_a_capture_is_the_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays would use the half and the number of the call that the host knew at the capture."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    a, gemm = _operands()
    for name in ("auto", "collective"):
        assert choice.backend_for(name, _group(), "gather", gemm, 8192, a).name == "collective"
    for name in ("copy_engine", "fused"):
        with pytest.raises(FluidError, match=f"the {name} backend .* cannot be captured"):
            choice.backend_for(name, _group(), "gather", gemm, 8192, a)


@pytest.mark.usefixtures("nothing_symmetric")
@pytest.mark.parametrize(
    ("ranks", "kind", "reason"),
    [(2, torch.Tensor, "its operands are on a CPU"), (1, _OnGpu, "the group has one rank")],
)
def test_where_nothing_can_overlap_the_collective_serves_and_others_say_why_not(
    ranks: int, kind: type[torch.Tensor], reason: str
) -> None:
    group = _group(ranks)
    a, gemm = _operands()
    a = a.as_subclass(kind)
    for name in ("auto", "collective"):
        assert choice.backend_for(name, group, "gather", gemm, 8192, a).name == "collective"
    for name in ("copy_engine", "fused"):
        with pytest.raises(ConfigError, match=f"found '{name}'.*because {reason}"):
            choice.backend_for(name, group, "gather", gemm, 8192, a)


def test_megatrons_linears_ask_with_their_three_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = pytest.importorskip("megatron_fluid.patches.linears")
    a, gemm = _operands()
    _chosen(monkeypatch, a, gemm, 8192)
    noted: list[str] = []
    monkeypatch.setattr(linears, "note", lambda linear, on, reason: noted.append(reason))
    x = torch.zeros(1, 1, 4096, dtype=a.dtype).as_subclass(_OnGpu).expand(2048, 2, 4096)
    assert linears.faster_than_nccl(None, _group(), "gather", gemm.b, x) and noted == ["fused"]


TABLE = [
    ("H200", 4, "gather", 1024, 512, 512, "fused"),
    ("H200", 4, "gather", 4096, 512, 512, "copy_engine"),
    ("H200", 8, "gather", 1024, 512, 512, "collective"),
    ("H200", 4, "scatter", 8192, 4096, 1024, "fused"),
    ("H200", 4, "scatter", 8192, 8192, 2048, "copy_engine"),
]


def _backend(m: int, n: int = 512, k: int = 512, gpu: str = "H200", ranks: int = 4) -> str:
    return choice.nearest_backend(TABLE, gpu, ranks, "gather", (m, n, k))


def test_a_measured_shape_speaks_for_its_neighbours_and_for_larger_ones() -> None:
    found = {m: _backend(m) for m in (512, 1024, 1500, 3000, 8192, 100_000)}
    fused, engine = dict.fromkeys((512, 1024, 1500), "fused"), (3000, 8192, 100_000)
    assert found == fused | dict.fromkeys(engine, "copy_engine")
    assert _backend(1024, k=2048) == "fused"
    # Both are half as long; one is alike in N and K.
    scatter = choice.nearest_backend(TABLE, "H200", 4, "scatter", (16384, 8192, 2048))
    assert scatter == "copy_engine"


def test_what_is_smaller_than_half_of_any_measured_shape_is_left_to_the_collective() -> None:
    assert _backend(256) == _backend(1024, n=128) == _backend(0) == "collective"


def test_another_gpu_and_another_number_of_ranks_take_the_nearest_entries() -> None:
    assert _backend(1024, gpu="A100") == _backend(1024, ranks=2) == "fused"
    assert _backend(1024, ranks=16) == "collective"


def test_on_a_gpu_a_shape_is_compared_until_it_has_followed_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    monkeypatch.setattr(ops, "compare_shapes", lambda *given: compared.append(given[3][0]))
    monkeypatch.setattr(ops, "agreement", lambda group: None)
    calls, a = ops._Calls(_group()), _operands()[0]
    for rows in (8, 8, 8, 8, 4, 8, 8, 8):
        calls.compare("all_gather_matmul", "a_shard [m, K]", (rows, 4096), a)
    calls.compare("matmul_reduce_scatter", "C [M, N]", (8, 4096), a)
    assert compared == [8, 8, 4, 8, 8, 8]


def test_after_the_first_a_collective_is_watched_on_the_callers_stream_by_events_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Event:
        over = False

        def record(self, stream: object) -> None:
            did.append(stream)

        def query(self) -> bool:
            return self.over

    did: list[Any] = []
    watched: list[tuple[Any, Any]] = []
    events: list[Event] = []
    waits = SimpleNamespace(device=torch.device("cuda"), channel=SimpleNamespace(alone=False))
    waits.collective, waits.timeout_s = (lambda name, launch: launch()), 60.0
    waits.watch = lambda name, start, end, *_: watched.append((start, end))
    monkeypatch.setattr(collective, "group_waits", lambda group: waits)
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(Event()) or events[-1])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    backend, a = collective.CollectiveBackend(_group()), _operands()[0]

    def run() -> None:
        backend._in_stream("gather", lambda *_, **named: did.append("async_op" in named), a, a)

    run()
    assert did == [True] and not watched, "the first one connects the ranks"
    run()
    run()
    assert did[1:] == ["stream", False, "stream"] * 2 and len(events) == 4, "none is over"
    (started, finished), _ = watched
    events[0].over = True
    assert started() and not finished()
    events[1].over = True
    assert finished()
    run()
    assert len(events) == 4 and watched[2] == (started, finished)
    run()
    assert len(events) == 6, "those of one that runs are not taken"
