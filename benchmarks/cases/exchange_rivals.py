"""Exchanges of tokens by other libraries: DeepEP 1.2 and NCCL EP, for training and for decoding.

docs/rivals.md says how each is installed. A function returns the calls of one case, with all that
depends on the routing alone done before: what they cost is the exchange.

Shapes: T tokens of this rank, K top-k, E experts, W ranks, H hidden.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.left_out import everywhere

__all__ = ["EXCHANGES", "LOW_LATENCY", "Calls", "missing_exchange"]

Calls = dict[str, Callable[[], object]]
_MODULES = {"deepep": "deep_ep", "nccl_ep": "nccl"}
_SMS = (24, 48)  # DeepEP's own benchmark takes 24
_CHUNKS = {"dispatch": (8, 16, 24, 32), "combine": (2, 4, 8, 16)}  # tokens of one send
_CHUNK_ROOM = 256
_CHANNELS = (0, 8, 12, 16, 24, 32)  # of NCCL EP, two SMs each; 0 leaves the number to it


def missing_exchange(variant: str) -> str | None:
    """Why this machine cannot measure DeepEP ("deepep") or NCCL EP ("nccl_ep"), or None."""
    module = _MODULES[variant]
    found = importlib.util.find_spec(module) is not None and torch.cuda.is_available()
    return None if found else f"{module} is not importable (docs/rivals.md)"


def _slowest_ms(call: Callable[[], object]) -> float:
    """Of five calls, for which the host has a head start as in the suite's samples."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)
    began.record()
    for _ in range(5):
        call()
    ended.record()
    torch.cuda.synchronize()
    took = torch.tensor(began.elapsed_time(ended), device="cuda")
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _fastest(calls: Mapping[int, Callable[[], object]]) -> tuple[float, int]:
    """(ms, key) of the fastest on the slowest rank. Collective."""
    return min((_slowest_ms(call), key) for key, call in calls.items())


@functools.cache
def _deepep_buffer(hidden: int) -> Any:
    """One buffer a process: every case up to this width takes it."""
    config = importlib.import_module("deep_ep").Config
    ranks = dist.get_world_size()
    sizes = [config(sms, max(_CHUNKS["dispatch"]), _CHUNK_ROOM) for sms in _SMS]
    most = max(size.get_nvl_buffer_size_hint(2 * hidden, ranks) for size in sizes)
    return importlib.import_module("deep_ep").Buffer(dist.group.WORLD, most)


def deepep_calls(x: Tensor, ids: Tensor, probs: Tensor, experts: int) -> tuple[Calls, str]:
    """DeepEP inside a host, a row to and from each rank of a token; the fastest of its settings
    that were tried, and their names.

    Args:
        x: bf16 [T, H]. ids: [T, K]. probs: fp32 [T, K].
    """
    config, buffer = importlib.import_module("deep_ep").Config, _deepep_buffer(x.shape[1])
    routing = {"topk_idx": ids.long(), "topk_weights": probs}
    to_rank, _, to_expert, in_rank, _ = buffer.get_dispatch_layout(routing["topk_idx"], experts)
    routing |= {"num_tokens_per_rank": to_rank, "num_tokens_per_expert": to_expert}
    best: tuple[float, Calls, str] | None = None
    for sms in _SMS:
        settings = {
            mode: {chunk: config(sms, chunk, _CHUNK_ROOM) for chunk in chunks}
            for mode, chunks in _CHUNKS.items()
        }
        plain = settings["dispatch"][8]
        first = buffer.dispatch(x, is_token_in_rank=in_rank, **routing, config=plain)
        received, handle = first[0], first[4]
        calls_of = {
            "dispatch": functools.partial(buffer.dispatch, x, handle=handle),
            "combine": functools.partial(buffer.combine, received.clone(), handle),
        }
        kinds: list[dict[int, Callable[[], object]]] = [
            {chunk: functools.partial(call, config=c) for chunk, c in settings[mode].items()}
            for mode, call in calls_of.items()
        ]
        (there, sent), (back, returned) = map(_fastest, kinds)
        if best is None or there + back < best[0]:
            calls = {"dispatch_once": kinds[0][sent], "combine_once": kinds[1][returned]}
            best = there + back, calls, f"{sms} SMs, chunks of {sent} and {returned} tokens"
    assert best is not None
    return best[1], best[2]


def _nccl_group(tokens: int, hidden: int, experts: int, algorithm: str, channels: int) -> Any:
    ep = importlib.import_module("nccl.ep")
    interop = importlib.import_module("nccl.ep.interop.torch")
    config = ep.GroupConfig(
        algorithm=ep.Algorithm[algorithm],
        num_experts=experts,
        max_dispatch_tokens_per_rank=tokens,
        max_recv_tokens_per_rank=tokens * dist.get_world_size(),
        max_token_bytes=2 * hidden,
        num_channels=channels,
    )
    return ep.Group.create(interop.get_nccl_comm_from_group(), config)


def _nccl_calls(
    algorithm: str, layout: str, x: Tensor, ids: Tensor, probs: Tensor, experts: int, room: int,
    channels: int = 0,
) -> Calls:  # fmt: skip
    """Dispatch and combine of bf16 rows x [T, H] by NCCL EP."""
    ep = importlib.import_module("nccl.ep")
    (tokens, hidden), ranks = x.shape, dist.get_world_size()
    group = _nccl_group(tokens, hidden, experts, algorithm, channels)
    fast = algorithm == "LOW_LATENCY"
    shape = (experts // ranks, room, hidden) if fast else (room, hidden)
    received, y, out = x.new_empty(shape), x.new_empty(shape), torch.empty_like(x)
    weights, choices = probs.float().contiguous(), ids.long().contiguous()
    of = {t: ep.Tensor(t) for t in (x, received, y, out, weights, choices)}
    options: dict[str, Any] = {"stream": torch.cuda.current_stream()}
    handle = group.create_handle(ep.Layout[layout], of[choices], **options)
    outputs: dict[str, Any] = {"tokens": of[received]}
    sent: dict[str, Any] = {"tokens": of[x]}
    if not fast:
        sent["topk_weights"] = of[weights]
        kept = weights.new_empty(room, ids.shape[1]), choices.new_empty(room, ids.shape[1])
        outputs |= {"topk_weights": ep.Tensor(kept[0]), "topk_idx": ep.Tensor(kept[1])}
    there = ep.DispatchInputs(**sent), ep.DispatchOutputs(**outputs)
    weighed = {"topk_weights": of[weights]} if fast else {}
    back = ep.CombineInputs(tokens=of[y]), ep.CombineOutputs(tokens=of[out], **weighed)
    config = {"config": ep.DispatchConfig()}
    if fast:
        counts = torch.zeros(experts // ranks, dtype=torch.int32, device=x.device)
        config["layout_info"] = ep.LayoutInfo(expert_counters=ep.Tensor(counts))
    alive = (group, of, outputs)  # the library holds addresses alone

    def dispatch(alive: object = alive) -> None:
        handle.dispatch(*there, **config, stream=torch.cuda.current_stream())

    def combine(alive: object = alive) -> None:
        handle.combine(*back, stream=torch.cuda.current_stream())

    return {"dispatch": dispatch, "combine": combine}


def nccl_ep_calls(x: Tensor, ids: Tensor, probs: Tensor, experts: int) -> tuple[Calls, str]:
    """NCCL EP's high-throughput mode, a row to and from each rank of a token, as DeepEP's; the
    fastest of the numbers of channels that were tried."""
    room = len(x) * dist.get_world_size()
    given = "HIGH_THROUGHPUT", "FLAT", x, ids, probs, experts, room
    best: tuple[float, Calls, str] | None = None
    for channels in _CHANNELS:
        words = f"high throughput, flat, {channels or 'its own number of'} channels"

        def tried(channels: int = channels) -> tuple[Calls, float]:
            calls = _nccl_calls(*given, channels)
            return calls, sum(map(_slowest_ms, calls.values()))

        found = everywhere(f"nccl_ep, {words}", tried)
        if found is not None and (best is None or found[1] < best[0]):
            best = found[1], found[0], words
    if best is None:
        raise RuntimeError("NCCL EP ran with no number of channels")
    return {f"{mode}_once": call for mode, call in best[1].items()}, best[2]


EXCHANGES = {"deepep": deepep_calls, "nccl_ep": nccl_ep_calls}
"""Of training, by variant: (x, ids, probs, E) -> calls of modes, and the settings in words."""


def _deepep_capacity(tokens: int, ranks: int) -> int:
    """The least bound on a rank's tokens that DeepEP takes: a multiple of four over all ranks."""
    return next(most for most in itertools.count(tokens) if most * ranks % 4 == 0)


@functools.cache
def _deepep_decoding(tokens: int, hidden: int, experts: int) -> Any:
    """One buffer for the largest case: NVSHMEM is started once a process."""
    kind, ranks = importlib.import_module("deep_ep").Buffer, dist.get_world_size()
    size = kind.get_low_latency_rdma_size_hint(tokens, hidden, ranks, experts)
    queues = experts // ranks
    return kind(dist.group.WORLD, 0, size, low_latency_mode=True, num_qps_per_rank=queues)


def deepep_decoding(
    x: Tensor, ids: Tensor, weights: Tensor, experts: int, largest: tuple[int, int, int]
) -> Calls:
    """DeepEP's low-latency mode: bf16 x [T, H], cast to fp8 in its dispatch, returns in bf16.
    largest: tokens, hidden and experts of the process' largest case."""
    ranks = dist.get_world_size()
    tokens = _deepep_capacity(len(x), ranks)
    buffer = _deepep_decoding(_deepep_capacity(largest[0], ranks), *largest[1:])
    buffer.clean_low_latency_buffer(tokens, x.shape[1], experts)
    choices = ids.long()
    dispatch = functools.partial(buffer.low_latency_dispatch, x, choices, tokens, experts)
    received, _, handle, _, _ = dispatch()
    y = torch.randn(received[0].shape, device=x.device).to(torch.bfloat16)
    combine = functools.partial(buffer.low_latency_combine, y, choices, weights, handle)
    return {"dispatch": dispatch, "combine": combine}


def nccl_ep_decoding(
    x: Tensor, ids: Tensor, weights: Tensor, experts: int, largest: tuple[int, int, int]
) -> Calls:
    """NCCL EP's low-latency mode, bf16 both ways."""
    room = len(x) * dist.get_world_size()
    return _nccl_calls("LOW_LATENCY", "EXPERT_MAJOR", x, ids, weights, experts, room)


LOW_LATENCY = {"deepep": deepep_decoding, "nccl_ep": nccl_ep_decoding}
"""Of decoding, by variant."""
