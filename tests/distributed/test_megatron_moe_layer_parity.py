"""One MoE layer of Megatron with the plug-in against Megatron's own, in double precision;
checkpoints of either in the other; what is left to Megatron.

One world of two ranks runs every case and hands the numbers back. The tests then judge them one by
one, so that a failure names its case.
"""

from __future__ import annotations

import logging
import math
import tempfile
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError
from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")


# name: (TransformerConfig overrides, sequence lengths of the two ranks, FluidConfig fields; the
# experts that all tokens want; whether the experts are frozen; tokens of padding; TEGroupedMLP)
LAYER_CASES: dict[str, tuple[dict[str, Any], tuple[int, int], dict[str, Any]]] = {
    "swiglu": ({}, (9, 9), {}),
    "uneven ranks": ({"num_moe_experts": 8, "moe_router_topk": 5}, (3, 17), {"dx_chunks": 2}),
    "all tokens to one rank": (
        {"num_moe_experts": 6, "moe_router_topk": 3},
        (4, 6),
        {"wanted": (0, 1, 2)},
    ),
    "all tokens to one expert": (
        {"moe_router_topk": 1, "moe_router_pre_softmax": True},
        (5, 6),
        {"wanted": (3,)},
    ),
    "top-1, one token": ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, (1, 1), {}),
    "every expert": ({"moe_router_topk": 4}, (7, 5), {"defer_weight_grads": True}),
    "geglu": ({"activation_func": F.gelu}, (6, 8), {}),
    "gelu": ({"activation_func": F.gelu, "gated_linear_unit": False}, (6, 8), {"dx_chunks": 5}),
    "padding mask": ({"moe_z_loss_coeff": 1e-2, "moe_aux_loss_coeff": 1.0}, (6, 7), {"padded": 2}),
    "grouped experts": (
        {"moe_grouped_gemm": True, "num_moe_experts": 6},
        (6, 9),
        {"grouped": True, "dx_chunks": 2},
    ),
    "grouped experts, activation recomputed": (
        {
            "moe_grouped_gemm": True,
            "recompute_granularity": "selective",
            "recompute_modules": ["moe_act"],
        },
        (6, 9),
        {"grouped": True, "defer_weight_grads": True},
    ),
    "frozen experts": ({}, (6, 6), {"frozen": True}),
    "one local expert": ({"num_moe_experts": 2, "moe_router_topk": 2}, (4, 4), {}),
}


def _layer_both(
    rank: int, overrides: dict[str, Any], lengths: tuple[int, int], fluid: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    """One MoELayer in fp64: for output, input gradient and every weight gradient, its size and the
    difference."""
    from tests.support import tiny_gpt

    settings = {"params_dtype": torch.float64, "moe_router_dtype": "fp64", **overrides}
    fields = dict(fluid)
    wanted, frozen = list(fields.pop("wanted", ())), fields.pop("frozen", False)
    padded, grouped = fields.pop("padded", 0), fields.pop("grouped", False)
    mask = torch.zeros(
        2, lengths[rank], dtype=torch.bool
    )  # [batch, sequence], True where it is padding
    mask[0, lengths[rank] - padded :] = True
    found: list[dict[str, torch.Tensor]] = []
    for on in (True, False):
        with (
            tiny_gpt.plug_in(on, **(fields if on else {})) as calls,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(
                "megatron_fluid.patches.moe.expert_modules._te_linear_types",
                lambda: (tiny_gpt.GroupedLinear,),
            )
            if not on:  # changes no number, and in Megatron's own path it needs Transformer Engine
                settings = {
                    name: value
                    for name, value in settings.items()
                    if not name.startswith("recompute")
                }
            config = tiny_gpt.config_of(**settings)
            layer = tiny_gpt.moe_layer(config, grouped=grouped)
            assert hasattr(layer.experts, "linear_fc1") is grouped
            generator = torch.Generator().manual_seed(77 + rank)
            hidden = torch.randn(
                lengths[rank], 2, config.hidden_size, dtype=torch.float64, generator=generator
            )
            if wanted:
                hidden = hidden.abs()
                with torch.no_grad():
                    layer.router.weight[wanted] = 1.0
            hidden.requires_grad_()
            layer.experts.requires_grad_(not frozen)
            for _ in range(2):  # the second adds to the first's gradients
                output, bias = layer(hidden, padding_mask=mask if padded else None)
                (output.square().sum() + output.sum()).backward()
            assert bias is None and len(calls) == (2 if on else 0)
            found.append({"output": output.detach(), "input": _required(hidden.grad)})
            found[-1] |= {
                name: _required(p.grad) for name, p in layer.named_parameters() if p.requires_grad
            }
            with torch.no_grad():
                found[-1]["output without gradients"] = layer.eval()(hidden)[0]
    return {
        name: (float(stock.abs().max()), float((stock - found[0][name]).abs().max()))
        for name, stock in found[1].items()
    }


def _required(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "no gradient"
    return tensor


def _checkpoints(rank: int) -> dict[str, Any]:
    """Distributed checkpoints written by either load into the other; plain state dicts have the
    same keys and shapes."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from megatron_fluid import get_fluid_custom_layers
    from tests.support import tiny_gpt

    def model(on: bool, seed: int) -> Any:
        with tiny_gpt.plug_in(on):
            config = tiny_gpt.config_of(num_moe_experts=8)
            return tiny_gpt.gpt(config, get_fluid_custom_layers(config) if on else None, seed=seed)

    shapes = [
        {n: getattr(v, "shape", None) for n, v in model(on, 1).state_dict().items()}
        for on in (False, True)
    ]
    different = []
    folders: list[Any] = [[tempfile.mkdtemp() for _ in range(2)] if rank == 0 else None]
    dist.broadcast_object_list(folders)
    for writer_on, folder in zip((True, False), folders[0], strict=True):
        writer, reader = model(writer_on, 1), model(not writer_on, 2)
        dist_checkpointing.save(writer.sharded_state_dict(), folder)
        reader.load_state_dict(dist_checkpointing.load(reader.sharded_state_dict(), folder))
        different += [
            name
            for (name, a), b in zip(writer.named_parameters(), reader.parameters(), strict=True)
            if not torch.equal(a, b)
        ]
    return {"shapes": shapes[0] == shapes[1], "different": different, "count": len(shapes[0])}


def _fallback(rank: int) -> dict[str, Any]:
    """What happens under settings that the overlapped path does not honour."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.training import activation_logging

    from megatron_fluid.patches import patched, revert
    from megatron_fluid.patches import startup_report as startup
    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt

    found: dict[str, Any] = {}
    revert(*tiny_gpt.MOE_PATCHES)
    methods = MoELayer.__init__, MoELayer.forward
    unsupported = tiny_gpt.config_of()
    unsupported.batch_invariant_mode = True
    with tiny_gpt.plug_in(True) as calls:
        found["patched"] = MoELayer.forward is not methods[1]
        try:
            tiny_gpt.gpt(unsupported)
        except ConfigError as error:
            found["explicit"] = str(error)
        set_config(FluidConfig(moe_backend="nvlink"))
        try:
            tiny_gpt.gpt(tiny_gpt.config_of())
        except ConfigError as error:
            found["nvlink"] = str(error)
        set_config(FluidConfig())
        losses = tiny_gpt.train(tiny_gpt.gpt(unsupported), iterations=2).losses
        found["auto"] = (all(map(math.isfinite, losses)), len(calls))
        found["features"] = startup.features()
        # A hook that one rank alone puts on an expert leaves both ranks Megatron's experts: no rank
        # waits for the other.
        layer = tiny_gpt.moe_layer(tiny_gpt.config_of())
        if rank == 1:
            layer.experts.local_experts[0].linear_fc1.register_forward_hook(lambda *_: None)
        layer(torch.randn(3, 1, 32))[0].sum().backward()
        reason = moe_layer.experts_reason_of(layer)
        found["hook"] = (moe_layer.backend_of(layer), reason, len(calls))
        # Megatron's own come and go with an iteration, on all ranks: a call of Megatron's between
        # overlapped ones.
        layer, x, taken = tiny_gpt.moe_layer(tiny_gpt.config_of()), torch.randn(3, 1, 32), []
        outputs = [layer(x)[0]]
        hook = activation_logging.ActivationLogger("")._make_activation_hook("chunk", "fc1")
        handle = layer.experts.local_experts[0].linear_fc1.register_forward_hook(
            hook, with_kwargs=True
        )
        taken.append(len(calls))
        outputs.append(layer(x)[0])
        taken.append(len(calls))
        handle.remove()
        outputs.append(layer(x)[0])
        taken.append(len(calls))
        found["saved"] = (
            [count - taken[0] for count in taken],
            all(torch.allclose(y, outputs[0], atol=1e-6) for y in outputs),
        )
    found["restored"] = (MoELayer.__init__, MoELayer.forward) == methods
    with patched(*tiny_gpt.MOE_PATCHES):
        pass
    found["restored"] &= (MoELayer.__init__, MoELayer.forward) == methods
    return found


def _cases(rank: int, world_size: int) -> dict[str, Any]:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    return {
        "layers": {
            name: tiny_gpt.guarded(lambda c=c: _layer_both(rank, *c))
            for name, c in LAYER_CASES.items()
        },
        "checkpoints": tiny_gpt.guarded(lambda: _checkpoints(rank)),
        "fallback": tiny_gpt.guarded(lambda: _fallback(rank)),
    }


@pytest.fixture(scope="module")
def ep2() -> list[dict[str, Any]]:
    return run_ranks(_cases, 2, timeout_s=240)


@pytest.mark.parametrize("name", LAYER_CASES)
def test_output_and_every_gradient_in_double_precision(
    ep2: list[dict[str, Any]], name: str
) -> None:
    for rank, result in enumerate(ep2):
        case = result["layers"][name]
        assert "error" not in case, f"rank {rank}:\n{case['error']}"
        weights = [n for n in case if "weight" in n]
        assert len(weights) >= (1 if name == "frozen experts" else 3) and any(
            case[n][0] > 0 for n in weights
        )
        for what, (size, difference) in case.items():
            assert difference <= 1e-11 * max(size, 1.0), (
                f"rank {rank}, {what}: {difference} of {size}"
            )


def test_checkpoints_of_either_load_in_the_other(ep2: list[dict[str, Any]]) -> None:
    for result in ep2:
        case = result["checkpoints"]
        assert "error" not in case, case["error"]
        assert case["shapes"] and case["count"] > 20 and not case["different"]


def test_what_is_not_honoured_keeps_megatrons_path_or_fails_by_name(
    ep2: list[dict[str, Any]],
) -> None:
    for result in ep2:
        case = result["fallback"]
        assert "error" not in case, case["error"]
        assert case["patched"] and case["restored"]
        assert (
            "moe_backend: found 'rounds'" in case["explicit"]
            and "batch_invariant_mode" in case["explicit"]
        )
        assert "moe_backend: found 'nvlink'" in case["nvlink"]
        assert case["auto"] == (True, 0)
        off = [reason for _, on, reason, _ in case["features"] if not on]
        assert any(reason.startswith("batch_invariant_mode") for reason in off)
        exchange, reason, calls = case["hook"]
        assert (exchange, calls) == (("rounds", None), 0)
        assert reason.startswith("rank 1 of the group: ") and "linear_fc1" in reason
        assert case["saved"] == ([0, 0, 1], True)
