"""The decode-time all-to-all on GPUs: CUDA-graph replays with changing routing, many routings,
other streams, the inference layer.
"""

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid import MoELayer
from megatron_fluid.low_latency import AllToAll, InferenceMoELayer
from tests.support.launch import run_ranks
from tests.support.machine import RANKS

_RANKS = min(RANKS, 4)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_RANKS < 2, reason="needs at least 2 ranks on GPUs"),
]
_TOLERANCE = 8e-3


class _Routing:
    """Random tokens of this rank and, by an all-gather, what each should receive; on the GPU."""

    def __init__(
        self, rank: int, world: int, capacity: int, experts: int, k: int, hidden: int
    ) -> None:
        self.rank, self.world, self.capacity, self.experts = rank, world, capacity, experts
        self.k, self.hidden, self.local = k, hidden, experts // world
        device = torch.device("cuda", torch.cuda.current_device())
        self.order = list(range(world))  # ranks in the order in which their tokens take slots
        self.x = torch.zeros(capacity, hidden, dtype=torch.bfloat16, device=device)
        self.ids = torch.zeros(capacity, k, dtype=torch.int32, device=device)
        self.weights = torch.zeros(capacity, k, device=device)
        self.bound = torch.zeros(1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(self.local, dtype=torch.int32, device=device)
        shape = (self.local, capacity * world, hidden)
        self.out_x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.out = torch.zeros(capacity, hidden, dtype=torch.bfloat16, device=device)
        # What an expert does: multiply.
        self.factor = (torch.arange(experts, device=device) % 7 + 1).float()
        self.generator = torch.Generator(device=device).manual_seed(rank)

    def draw(self, turn: int) -> None:
        """New tokens in place."""
        device, g = self.x.device, self.generator
        self.x.normal_(generator=g)
        scores = torch.rand(self.capacity, self.experts, device=device, generator=g)
        ids = scores.topk(self.k, -1).indices.int()
        if turn % 4 == 1:
            ids[torch.rand(ids.shape, device=device, generator=g) < 0.3] = -1
        if turn % 4 == 2:
            ids.copy_(torch.arange(self.k, device=device, dtype=torch.int32).expand_as(ids))
        self.ids.copy_(ids)
        self.weights.copy_(torch.rand(self.capacity, self.k, device=device, generator=g))
        self.bound.random_(0, self.capacity + 1, generator=g)
        if turn % 5 == 3 and self.rank == 0:
            self.bound.zero_()

    def open(
        self, timeout_s: float = 20.0, transport: str = "nvlink", domain_size: int | None = None
    ) -> AllToAll:
        if domain_size is not None:
            domains = range(self.world // domain_size)
            self.order = [n * domain_size + g for g in range(domain_size) for n in domains]
        tokens = self.capacity, self.experts, self.k, self.rank, self.world, 1
        more = {"transport": transport, "domain_size": domain_size, "timeout_s": timeout_s}
        return AllToAll.internode(*tokens, self.hidden, self.hidden * 2, 0, **more)

    def run(self, ata: AllToAll, split: bool, early: bool, tokens: Tensor | None = None) -> None:
        """dispatch, experts, combine: graph-capturable."""
        at_dispatch, at_combine = (self.weights, None) if early else (None, self.weights)
        factor = self.factor[self.rank * self.local :][: self.local, None, None].to(torch.bfloat16)
        x = self.x if tokens is None else tokens
        sent, received = (x, None, self.ids, self.bound), (self.counts, self.out_x, None)
        nothing = (None, None, None)
        if split:
            ata.dispatch(*nothing, *sent, do_recv=False, weights=at_dispatch)
            ata.dispatch(*received, *nothing, do_send=False)
        else:
            ata.dispatch(*received, *sent, weights=at_dispatch)
        y = self.out_x * factor
        self.out.fill_(5.0)
        if split:
            ata.combine(None, None, at_combine, y, self.bound, do_recv=False)
            ata.combine(self.out, self.ids, at_combine, None, self.bound, do_send=False)
        else:
            ata.combine(self.out, self.ids, at_combine, y, self.bound)

    def problems(self) -> Tensor:
        """[2]: how many experts received something wrong, and the relative error of the combined
        tokens."""
        every_ids = torch.empty(
            self.world, *self.ids.shape, dtype=torch.int32, device=self.x.device
        )
        every_x = torch.empty(self.world, *self.x.shape, dtype=self.x.dtype, device=self.x.device)
        bounds = torch.empty(self.world, dtype=torch.int32, device=self.x.device)
        for whole, part in ((every_ids, self.ids), (every_x, self.x), (bounds, self.bound)):
            dist.all_gather_into_tensor(whole.view(-1), part.reshape(-1))
        present = torch.arange(self.capacity, device=self.x.device)[None] < bounds[:, None]
        flat = torch.where(present[..., None], every_ids, -1)[self.order].view(-1)
        tokens = every_x[self.order].view(-1, self.hidden)
        wrong = torch.zeros((), device=self.x.device)
        for e in range(self.local):
            source = (flat == self.rank * self.local + e).nonzero()[:, 0] // self.k
            n = source.numel()
            same = bool(self.counts[e] == n) and torch.equal(self.out_x[e, :n], tokens[source])
            wrong += 0 if same else 1
        there = (self.ids >= 0) & present[self.rank][:, None]
        share = torch.where(
            there, self.weights * self.factor[self.ids.clamp(min=0).long()], 0.0
        ).sum(-1, keepdim=True)
        wanted = self.x.float() * share
        wanted[~present[self.rank]] = 5.0
        error = (self.out.float() - wanted).norm() / wanted.norm().clamp(min=1e-20)
        found = torch.stack([wrong, error])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found

    def check(self, ata: AllToAll, what: str, tolerance: float = _TOLERANCE) -> None:
        """Fail where something else than it should arrived, or was combined."""
        torch.cuda.synchronize()
        ata.check_errors()
        wrong, error = self.problems().tolist()
        assert wrong == 0 and error < tolerance, f"{what}: {wrong} experts wrong, error {error}"


def _random_routings(rank: int, world: int, split: bool, early: bool, turns: int) -> None:
    for capacity, experts, k, hidden in ((48, 16 * world, 8, 1024), (9, 2 * world, 3, 72)):
        routing = _Routing(rank, world, capacity, experts, k, hidden)
        ata = routing.open()
        for turn in range(turns):
            routing.draw(turn)
            routing.run(ata, split, early)
            routing.check(ata, f"turn {turn}")
        ata.destroy()


@pytest.mark.parametrize("early", [False, True], ids=["weights-at-combine", "weights-at-dispatch"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_many_random_routings(split: bool, early: bool) -> None:
    run_ranks(_random_routings, _RANKS, split, early, 130, backend="nccl", timeout_s=200)


def _graph(rank: int, world: int, split: bool, replays: int) -> None:
    routing = _Routing(rank, world, 16, 8 * world, 4, 512)
    ata = routing.open()
    routing.draw(0)
    routing.run(ata, split, True)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing.run(ata, split, True)
    # Replays back to back, without a barrier, while ranks drift; now and then the routing changes
    # and is checked.
    checks = 25
    for turn in range(checks):
        routing.draw(turn)
        for _ in range(replays // checks):
            graph.replay()
        routing.check(ata, f"turn {turn}")
    ata.destroy()


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_graph_replays_with_changing_routing_and_token_counts(split: bool) -> None:
    run_ranks(_graph, _RANKS, split, 10_000, backend="nccl", timeout_s=200)


def _inference_layer(rank: int, world: int, activation: str, shared: int) -> None:
    config = {
        "hidden_size": 512, "ffn_hidden_size": 256, "num_experts": 8 * world, "top_k": 4,
        "init_std": 0.05, "activation": activation, "shared_ffn_hidden_size": shared,
    }  # fmt: skip
    device = torch.device("cuda", torch.cuda.current_device())
    training = MoELayer(config, dist.group.WORLD, device=device, dtype=torch.bfloat16).eval()
    layer = InferenceMoELayer.of(
        training, max_num_tokens=32, group=dist.group.WORLD, transport="nvlink", timeout_s=20.0
    )
    tokens = torch.randn(32, 512, device=device, dtype=torch.bfloat16)
    count = torch.full((1,), 32, dtype=torch.int32, device=device)

    def compare(found: Tensor, turn: int) -> None:
        with torch.no_grad():
            wanted = training(tokens)
        found, wanted = (x[: int(count)].float() for x in (found, wanted))
        error = (found - wanted).norm() / wanted.norm().clamp(min=1e-20)
        assert error < 2e-2, f"turn {turn}: relative error {error}"

    compare(layer(tokens, bound_m=count), -1)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer(tokens, bound_m=count)
    for turn in range(20):
        tokens.normal_()
        count.fill_((7 * turn + 5 * rank) % 33)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        layer.all_to_all.check_errors()
        compare(found, turn)
    del graph
    layer.destroy()


@pytest.mark.parametrize(("activation", "shared"), [("swiglu", 128), ("gelu", 0)])
def test_the_inference_layer_in_a_graph_computes_what_the_training_layer_does(
    activation: str, shared: int
) -> None:
    run_ranks(_inference_layer, _RANKS, activation, shared, backend="nccl", timeout_s=90)


def _beside_others(rank: int, world: int) -> None:
    routing = _Routing(rank, world, 32, 8 * world, 4, 2048)
    ata = routing.open()
    side = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    big = torch.randn(1 << 24, device="cuda")
    for turn in range(30):
        routing.draw(turn)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            dist.all_reduce(big)
            for _ in range(4):
                a @ a
        routing.run(ata, turn % 2 == 0, turn % 3 == 0)
        torch.cuda.current_stream().wait_stream(side)
        routing.check(ata, f"turn {turn}")
    ata.destroy()


@pytest.mark.parametrize("connections", ["1", "32"])
def test_beside_gemms_and_nccl_on_another_stream(connections: str) -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    run_ranks(_beside_others, _RANKS, backend="nccl", timeout_s=120, env=env)


def _compiled(rank: int, world: int) -> None:
    routing = _Routing(rank, world, 8, 4 * world, 2, 128)
    ata = routing.open()
    routing.draw(0)

    def step(x: Tensor) -> Tensor:
        routing.run(ata, False, True, x * 1.0)
        return routing.out + 0.0

    torch.compile(step)(routing.x)
    routing.check(ata, "compiled")
    ata.destroy()


def test_inside_torch_compile() -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": f"/tmp/inductor-{os.getpid()}"}
    run_ranks(_compiled, _RANKS, backend="nccl", timeout_s=120, env=env)
