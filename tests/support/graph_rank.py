"""A rank of the end-to-end benchmark to which something happens while it trains.
Run with Megatron's flags (graph_jobs.py). GRAPH_RANK holds JSON: "turns", two iterations in which
routers send all tokens to the first, the last experts (needs expert biases); "text", a folder for
tokens of Python's library in place of mock data; "dies", the replay in which the last rank dies.
"""

import functools
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_BIAS = 10.0  # beyond all scores, which a sigmoid bounds


def main() -> None:
    """Train, and let it happen."""
    options = json.loads(os.environ.get("GRAPH_RANK", "{}"))
    rank = importlib.import_module("benchmarks.cases.pretrain_rank")  # imports megatron_fluid first
    training = importlib.import_module("megatron.training.training")
    training.train_step = _telling(training.train_step)
    if turns := options.get("turns"):
        training.train_step = _turning(training.train_step, turns)
    if folder := options.get("text"):
        rank._data_sets = _text(folder)
    if at := options.get("dies"):
        _die(at)
    rank.main()


def _telling(step: Callable[..., Any]) -> Callable[..., Any]:
    """A training step that prints the norm of the gradients with all its bits."""

    @functools.wraps(step)
    def telling(*args: Any, **kwargs: Any) -> Any:
        done = step(*args, **kwargs)
        if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):  # as Megatron's log
            print(f"iteration | exact norm: {float(done[5]).hex()} |", flush=True)
        return done

    return telling


def _turning(step: Callable[..., Any], turns: Sequence[int]) -> Callable[..., Any]:
    """A training step whose routing is uneven in the iterations `turns`."""
    router = importlib.import_module("megatron.core.transformer.moe.router").TopKRouter
    iterations = iter(range(1, 1_000_000))

    def turn(model: Any, first: bool, bias: float) -> None:
        routers = [one for chunk in model for one in chunk.modules() if isinstance(one, router)]
        assert routers
        for one in routers:
            one.expert_bias[slice(None, one.topk) if first else slice(-one.topk, None)] += bias

    @functools.wraps(step)
    def turning(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        now = next(iterations)
        if now in turns:
            turn(model, now == turns[0], _BIAS)
        result = step(forward_step, data, model, *args, **kwargs)
        if now in turns:
            turn(model, now == turns[0], -_BIAS)
        return result

    return turning


def _text(folder: str) -> Callable[..., Any]:
    """A provider of data sets of text."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    text = importlib.import_module("text_dataset")
    library = importlib.import_module("text_files").standard_library_files()
    built = text.build_text_dataset(library, text.ByteTokenizer(), (1.0, 0.0, 0.0), folder)

    def data_sets(sizes: Any, vp_stage: int | None = None) -> Any:
        args = importlib.import_module("megatron.training").get_args()
        args.mock_data, args.split = False, None
        for name, prefix in built.prefixes.items():
            setattr(args, f"{name}_data_path", None if prefix is None else [prefix])
        return importlib.import_module("pretrain_data").datasets_provider(sizes, vp_stage)

    return data_sets


def _die(at: int) -> None:
    """Let the last rank end as soon as it has launched that replay."""
    import torch

    if int(os.environ["RANK"]) != int(os.environ["WORLD_SIZE"]) - 1:
        return
    replay, replays = torch.cuda.CUDAGraph.replay, iter(range(1, 1_000_000))

    def dying(graph: torch.cuda.CUDAGraph) -> None:
        replay(graph)
        if next(replays) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.cuda.CUDAGraph.replay = dying  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
