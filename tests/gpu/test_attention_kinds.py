"""Megatron's attention of many kinds under context parallelism over NVLink, against the same module
on the whole sequence on one rank: softmax with an offset, windows, output gate, norms, YaRN,
recomputation, fused and deferred gradients, copy engines, latent attention, in Transformer Engine's
spec and, in fp32, in the local one; and tensor parallelism beside it."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.cases.attention import cp_backend, start_megatron
from megatron_fluid.attention.layouts import SequenceLayout
from tests.distributed.test_packed_attention import pack, padded_rows, rows_of
from tests.support.launch import run_ranks
from tests.support.machine import GPUS, RANKS, SHARED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU, found none")]
WORLD = max(min(RANKS, 4), 1)
HIDDEN, HEADS, BATCH, DIM = 256, 16, 2, 64


@dataclasses.dataclass(frozen=True)
class Kind:
    """One module: Transformer Engine's spec in bf16 (`te`) or the local one in fp32. Weight
    gradients that are `deferred` wait for the scheduler; `engine` has copy engines and several head
    groups, as for long sequences."""

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    kv_heads: int = 8
    latent: bool = False
    overlapped: bool = True  # whether its projections are, too
    te: bool = True
    fused: bool = False  # gradients of the projections go to main_grad
    deferred: bool = False
    recompute: bool = False  # the whole attention
    engine: bool = False
    rotated: float = 1.0  # the part of a head that is rotated

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.te else torch.float32


NORMS, BIASES = ("qk_layernorm", True), ("add_bias_linear", True)
LEARNABLE, WINDOW = ("softmax_type", "learnable"), ("window_size", (40, 0))
YARN = (("yarn_rotary_scaling_factor", 8.0), ("yarn_mscale", 1.0), ("yarn_mscale_all_dim", None))
RECOMPUTE = ("recompute_granularity", "selective"), ("recompute_modules", ["core_attn"])
KINDS = [
    Kind("plain"), Kind("offset", (LEARNABLE,)),
    Kind("offset, core alone", (LEARNABLE,), overlapped=False),
    Kind("offset off by one", (("softmax_type", "off-by-one"),)),
    Kind("gpt-oss", (LEARNABLE, WINDOW, *YARN, BIASES)), Kind("window", (WINDOW,), kv_heads=1),
    Kind("gate", (("attention_output_gate", True), NORMS)),
    Kind("LayerNorm", (("normalization", "LayerNorm"), NORMS)),
    Kind("L2 norm", (("qk_l2_norm", True),)), Kind("core recomputed", RECOMPUTE),
    Kind("copy engines, main_grad", kv_heads=16, engine=True, fused=True),
    Kind("copy engines, recomputed", (NORMS,), engine=True, recompute=True, rotated=0.5),
    Kind("main_grad, deferred, biases", (BIASES,), fused=True, deferred=True),
    Kind("local modules, norms, biases", (NORMS, BIASES), te=False, rotated=0.5),
    Kind("local modules, interleaved", (("rotary_interleaved", True),), kv_heads=1, te=False),
    Kind("local modules, copy engines", (NORMS,), 16, te=False, engine=True, recompute=True),
    Kind("local modules, deferred", te=False, engine=True, deferred=True),
    Kind("latent", latent=True), Kind("latent, exchanged", latent=True, overlapped=False),
    Kind("latent, YaRN", (("rope_type", "yarn"), ("rotary_scaling_factor", 4.0)), latent=True),
    Kind("latent, no query rank", (("q_lora_rank", None), ("qk_layernorm", False)), latent=True),
]  # fmt: skip


def _module(kind: Kind, ranks: int, groups: Any = None, **sizes: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "bf16": kind.te,
        "params_dtype": kind.dtype, "normalization": "RMSNorm", "context_parallel_size": ranks,
        "cp_comm_type": "a2a", "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "persist_layer_norm": False, "add_bias_linear": False,
        "gradient_accumulation_fusion": kind.fused and ranks > 1, **sizes,
    }  # fmt: skip
    if kind.latent:
        settings |= {
            "q_lora_rank": 96, "kv_lora_rank": 64, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32,
            "v_head_dim": 64, "rope_type": "rope", "qk_layernorm": True,
        }  # fmt: skip
    else:
        settings |= {"num_query_groups": kind.kv_heads, "kv_channels": DIM}
    settings |= dict(kind.settings)
    yarn = {name: settings.pop(name) for name in list(settings) if name.startswith("yarn_")}
    config = (MLATransformerConfig if kind.latent else TransformerConfig)(**settings)
    for name, value in yarn.items():
        setattr(config, name, value)
    make = get_gpt_layer_with_transformer_engine_spec if kind.te else get_gpt_layer_local_spec
    more = {} if kind.te else {"normalization": "RMSNorm"}
    spec = make(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=kind.latent,
        qk_l2_norm=config.qk_l2_norm,
        **more,
    ).submodules.self_attention
    with cp_backend("nvlink" if ranks > 1 else "megatron"):
        module = build_module(
            spec, config=config, layer_number=1, cp_comm_type="a2a", pg_collection=groups
        )
    return module.to(device="cuda", dtype=kind.dtype)


def _step(
    module: Any, x: torch.Tensor, upstream: torch.Tensor, rotations: Any, recompute: bool = False
) -> Any:
    """Output and every gradient, of what goes to main_grad from there."""
    from megatron.core.tensor_parallel.random import checkpoint

    from megatron_fluid.backward.weight_grads import get_backward_scheduler

    fused = module.config.gradient_accumulation_fusion
    for linear in (module.linear_qkv, module.linear_proj) if fused else ():
        linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)
        linear.weight.grad_added_to_main_grad = False
    mine = x.clone().requires_grad_()
    more = {} if rotations is None else {"rotary_pos_emb": rotations}

    def call(hidden: torch.Tensor) -> torch.Tensor:
        y, bias = module(hidden, None, **more)
        return y if bias is None else y + bias  # type: ignore[no-any-return]

    y = checkpoint(call, False, mine) if recompute else call(mine)
    y.backward(upstream)
    get_backward_scheduler().finish_batch()
    gradients = {}
    for name, parameter in module.named_parameters():
        added = getattr(parameter, "grad_added_to_main_grad", False)
        assert added == (fused and name in ("linear_qkv.weight", "linear_proj.weight")), name
        gradients[name] = parameter.main_grad if added else parameter.grad
    assert mine.grad is not None and all(g is not None for g in gradients.values())
    return {"y": y.detach(), "dx": mine.grad, **gradients}


def _kinds(rank: int, world: int, kinds: list[Kind]) -> None:
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_fluid import patches
    from megatron_fluid.attention.exchange import symmetric
    from megatron_fluid.backward.weight_grads import get_backward_scheduler
    from megatron_fluid.patches.attention import latent, self_attention
    from megatron_fluid.patches.attention.core import exchanges_of

    patches.apply_all()
    if SHARED:  # gloo scatters no tensors of GPUs: not what small GEMMs would take by themselves
        latent.all_gather_matmul = functools.partial(  # type: ignore[assignment]
            latent.all_gather_matmul, backend="copy_engine"
        )
    reason = start_megatron(te=kinds[0].te, context_parallel_size=world)
    assert reason is None, reason
    tensor = parallel_state.get_tensor_model_parallel_group()
    alone = ProcessGroupCollection(tp=tensor, cp=tensor)
    length = 64 * world
    rows = SequenceLayout(length, world, "zigzag").positions(rank).cuda()
    generator = torch.Generator("cuda").manual_seed(5)
    for kind in kinds:
        interleaved = dict(kind.settings).get("rotary_interleaved", False)
        angles = RotaryEmbedding(DIM, kind.rotated, interleaved).get_emb(length).cuda()
        if kind.engine:
            symmetric._COPY_ENGINE_BYTES = 1 << 10
        whole = _module(kind, 1, alone)
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.add_(
                    torch.randn(parameter.shape, device="cuda", generator=generator) / 20
                )
        ours = _module(kind, world)
        ours.load_state_dict(whole.state_dict())
        assert exchanges_of(ours.core_attention) is not None, kind
        decisions: Any = latent.DECISIONS if kind.latent else self_attention.DECISIONS
        if not kind.overlapped:
            decisions.leave(ours)
        assert decisions.get(ours).backend == ("nvlink" if kind.overlapped else None), kind
        x, upstream = (
            torch.randn(length, BATCH, HIDDEN, device="cuda", generator=generator).to(kind.dtype)
            for _ in range(2)
        )
        expected = _step(whole, x, upstream, None if kind.latent else angles)
        get_backward_scheduler().enabled = kind.deferred
        rotations = None if kind.latent else angles[rows]
        found = _step(ours, x[rows], upstream[rows], rotations, kind.recompute)
        get_backward_scheduler().disable()
        assert (decisions.get(ours).path is not None) == kind.overlapped, kind
        assert found.keys() == expected.keys(), kind
        for name, theirs in expected.items():
            mine = found[name].float()
            if name in ("y", "dx"):
                theirs = theirs[rows]
            else:
                dist.all_reduce(mine)
            error = (mine - theirs.float()).norm() / theirs.float().norm()
            assert error < (3e-2 if kind.te else 1e-4), f"{kind.name} {name}: {error:.2e}"


@pytest.mark.skipif(WORLD < 2, reason="needs 2 ranks on GPUs")
@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_it_is_that_of_the_whole_sequence(kind: Kind) -> None:
    pytest.importorskip("megatron.core")
    if kind.te:
        pytest.importorskip("transformer_engine.pytorch")
    run_ranks(_kinds, WORLD, [kind], backend="nccl", timeout_s=240)


LENGTHS = (70, 3, 128, 41)


def _packs(rank: int, world: int, left: bool) -> None:
    """Packed sequences, each padded to a multiple of twice the ranks, against the whole pack."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_fluid import patches
    from megatron_fluid.patches.attention import self_attention
    from megatron_fluid.patches.features import features

    patches.apply_all()
    reason = start_megatron(context_parallel_size=world)
    assert reason is None, reason
    tensor = parallel_state.get_tensor_model_parallel_group()
    kind = Kind("packs")
    whole = _module(kind, 1, ProcessGroupCollection(tp=tensor, cp=tensor))
    ours = _module(kind, world)
    ours.load_state_dict(whole.state_dict())
    if left:
        self_attention.leave(ours)
    mine, padded = rows_of(rank, world, LENGTHS).cuda(), padded_rows(world, LENGTHS)
    begins = torch.tensor([0, *padded]).cumsum(0).tolist()
    real = [torch.arange(b, b + n) for b, n in zip(begins, LENGTHS, strict=False)]
    # What padding gives is nobody's.
    total = sum(padded)
    used = torch.zeros(total, 1, 1, device="cuda", dtype=torch.bfloat16)
    used[torch.cat(real).cuda()] = 1
    angles = RotaryEmbedding(DIM, 1.0).get_emb(max(padded)).cuda()
    generator = torch.Generator("cuda").manual_seed(5)
    x, upstream = (
        torch.randn(total, 1, HIDDEN, device="cuda", generator=generator).bfloat16()
        for _ in range(2)
    )
    upstream = upstream * used

    def step(module: Any, part: torch.Tensor) -> dict[str, torch.Tensor]:
        given = x[part].clone().requires_grad_()
        y, _ = module(
            given, None, rotary_pos_emb=angles, packed_seq_params=pack(world, LENGTHS, "cuda")
        )
        y.backward(upstream[part])
        assert given.grad is not None
        gradients = {name: p.grad for name, p in module.named_parameters()}
        return {"y": y.detach() * used[part], "dx": given.grad, **gradients}  # type: ignore[dict-item]

    expected, found = step(whole, torch.arange(total, device="cuda")), step(ours, mine)
    for name, theirs in expected.items():
        ours_f = found[name].float()
        if name in ("y", "dx"):
            theirs = theirs[mine]
        else:
            dist.all_reduce(ours_f)
        error = (ours_f - theirs.float()).norm() / theirs.float().norm()
        assert error < 3e-2, f"{name}: {error:.2e}"
    assert not [reason for _, on, reason, _ in features() if "in some calls" in reason]


@pytest.mark.skipif(WORLD < 2, reason="needs 2 ranks on GPUs")
@pytest.mark.parametrize("left", [False, True], ids=["overlapped", "exchanged"])
def test_packed_sequences_are_those_of_the_whole_pack(left: bool) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformer_engine.pytorch")
    run_ranks(_packs, WORLD, left, backend="nccl", timeout_s=240)


def _tensor_parallel(rank: int, world: int, kinds: list[Kind]) -> None:
    """Overlapped against Megatron's projections around the exchanged core, both on TP2 x CP2."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_fluid import patches
    from megatron_fluid.patches.attention import self_attention

    patches.apply_all()
    reason = start_megatron(tensor_model_parallel_size=2, context_parallel_size=2)
    assert reason is None, reason
    context = parallel_state.get_context_parallel_group()
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    rotations = RotaryEmbedding(DIM, 1.0)(256)
    generator = torch.Generator("cuda").manual_seed(rank)
    for kind in kinds:
        modules = [_module(kind, 2, **sizes) for _ in range(2)]
        for parameter in modules[0].parameters():  # alike on context-parallel ranks
            source = dist.get_process_group_ranks(context)[0]
            dist.broadcast(parameter.data, source, group=context)
        modules[1].load_state_dict(modules[0].state_dict())
        self_attention.leave(modules[0])
        assert self_attention.overlapped(modules[1]) == "nvlink"
        x, upstream = (
            torch.randn(64, BATCH, HIDDEN, device="cuda", generator=generator).bfloat16()
            for _ in range(2)
        )
        theirs, ours = (_step(module, x, upstream, rotations) for module in modules)
        for name, expected in theirs.items():
            a, b = ours[name].float(), expected.float()
            if name not in ("y", "dx"):  # a rank's share is of its rows or of its heads
                dist.all_reduce(a, group=context)
                dist.all_reduce(b, group=context)
            error = (a - b).norm() / b.norm()
            assert error < 2e-2, f"{kind.name} {name}: {error:.2e}"


@pytest.mark.skipif(GPUS < 4, reason="needs 4 GPUs, one for each rank")
def test_tensor_parallelism_beside_it_changes_nothing() -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformer_engine.pytorch")
    names = ("plain", "gpt-oss", "gate")
    kinds = [kind for kind in KINDS if kind.name in names]
    run_ranks(_tensor_parallel, 4, kinds, backend="nccl", timeout_s=240)
