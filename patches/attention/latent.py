"""The overlapped forward of Megatron's latent attention (MLA) under context parallelism by a2a.

Megatron projects compressed rows up to all heads, and the core attention exchanges heads. Here the
compressed rows are gathered, which are a fraction of that, and each rank projects them to its own
heads of the whole sequence: as many products, and each gather is overlapped with its projection,
in backward the scatter of its gradient too (megatron_fluid.tensor_parallel over the
context-parallel group). The output returns by head groups while the next group is attended.

Projections down, norms, the output projection, parameters and checkpoints stay Megatron's.

Legend: S whole sequence, s = S / C a rank's part, b batch, H hidden, n heads, D width of a head of
queries and keys, R of their rotated part, Dv of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.attention.attention_kernels import CoreCase
from megatron_fluid.attention.exchanged import return_rows
from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.backward.functions import once_differentiable
from megatron_fluid.comm.waits import group_waits
from megatron_fluid.config import FluidConfig
from megatron_fluid.patches.attention.core import REPORT as CORE_REPORT
from megatron_fluid.patches.attention.core import exchanges_of, softmax_offset
from megatron_fluid.patches.attention.latent_limits import latent_module_reason as module_reason
from megatron_fluid.patches.attention.latent_limits import latent_setting_reason, projected_up
from megatron_fluid.patches.attention.packed_sequences import Reorder
from megatron_fluid.patches.attention.transformer_engine import core_kernel
from megatron_fluid.patches.cpu.mode import cpu_mode_active
from megatron_fluid.patches.engine.module_hooks import ModuleHooks
from megatron_fluid.patches.linears.transformer_engine import norm_of_rows, quantises
from megatron_fluid.patches.overlap_decision import Decision, OverlapDecisions
from megatron_fluid.patches.rank_findings import Finding
from megatron_fluid.patches.weight_gradients import rows_gradient_of
from megatron_fluid.plan.layers import EXCHANGED, OVERLAPPED, LatentWork, latent_forms
from megatron_fluid.plan.machine import Machine, agreed_machine
from megatron_fluid.plan.model import fastest
from megatron_fluid.tensor_parallel import all_gather_matmul

__all__ = ["DECISIONS", "OverlappedLatentAttention", "forward", "init"]


def init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `MLASelfAttention.__init__`: decide whether the built module is overlapped."""
    return DECISIONS.announcing(original)


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `MultiLatentAttention.forward`."""

    @functools.wraps(original)
    def fluid_forward(
        self: Any, hidden_states: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        decision = DECISIONS.get(self)
        if decision is None or not decision.settled:
            decision = DECISIONS.settle(self)
        path = decision.path
        if path is not None:
            given = any(value is not None for value in (*args, *kwargs.values()))
            reason = "further arguments are given (packed sequences, inference)" if given else None
            reason = reason or path.unsupported_reason(hidden_states, attention_mask)
            if reason is None:
                if (changed := path.changed(self)) is not None:
                    DECISIONS.refuse_change(self, changed)
                return path.forward(self, hidden_states)
            DECISIONS.report.note_late("in some calls", reason)
        return original(self, hidden_states, attention_mask, *args, **kwargs)

    return fluid_forward


class OverlappedLatentAttention:
    """What the overlapped forward of one module needs from call to call. It holds no state of any
    call, and not the module.

    Args:
        attention: the module.
        config: the settings in force when it was built.
        machine: figures by which each call is overlapped or not, alike on all ranks; None: every
            call is.
    """

    def __init__(self, attention: Any, config: FluidConfig, machine: Machine | None) -> None:
        from megatron.core.inference.utils import InferenceMode

        exchanges = exchanges_of(attention.core_attention)
        assert exchanges is not None
        self.config, self.machine, self.exchanges = config, machine, exchanges
        self.group, self.core = exchanges.group, attention.core_attention
        model = attention.config
        self.widths = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
        self.q_up, self.kv_up = projected_up(attention).values()
        self.masks_matter = "alone" not in self.core.__dict__
        self.causal = attention.attn_mask_type.name == "causal"
        self.modules = projected_up(attention) | {"core_attention": self.core}
        self.hooks = ModuleHooks(**self.modules)
        self.inference_active = InferenceMode.is_active
        self._slower = functools.lru_cache(maxsize=64)(self._predicted_slower)

    def changed(self, attention: Any) -> str | None:
        """What calling this rank's modules would do besides since the ranks chose this path
        together, or None."""
        held = attention._modules
        replaced = (name for name, module in self.modules.items() if held.get(name) is not module)
        found = next((f"{name} was replaced" for name in replaced), None)
        return found or self.hooks.replaced() or self.hooks.foreign()

    def unsupported_reason(self, x: Tensor, mask: Tensor | None) -> str | None:
        """Why this call keeps Megatron's projections up, on all ranks alike; or None."""
        if mask is not None and self.masks_matter:
            return "attention_mask is given"
        if x.dim() != 3 or x.shape[0] % 2 or x.dtype != self.kv_up.weight.dtype:
            return "its input is of another dtype than its weights, or of an odd number of rows"
        if self.inference_active() or torch.is_autocast_enabled(x.device.type) or quantises():
            return "autocast or inference is on"
        if self.machine is not None:
            slower = self._slower(self.machine, x.shape[0] * x.shape[1], x.dtype.itemsize)
            if slower is not None:
                return slower
        return self.hooks.logged()

    def _predicted_slower(self, machine: Machine, rows: int, itemsize: int) -> str | None:
        heads = self.exchanges.heads
        products = tuple(
            (int(linear.weight.shape[0]), int(linear.weight.shape[1]))
            for linear in (self.q_up, self.kv_up)
        )
        work = LatentWork(heads.world, rows, products, heads.qkv_rows, itemsize)
        forms = latent_forms(machine, work)
        if fastest(forms, EXCHANGED) == OVERLAPPED:
            return None
        before, after = (forms[name].seconds * 1e3 for name in (EXCHANGED, OVERLAPPED))
        return (
            f"{rows} rows are predicted to take {before:.3g} ms more to be projected up and "
            f"exchanged and {after:.3g} ms to be gathered and projected (--fluid-cp-backend nvlink "
            "gathers them all the same)"
        )

    def forward(self, attention: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, H] -> ([s, b, H], the output projection's bias or None)."""
        self.hooks.run_parameter_gather()
        model, (rows, batch) = attention.config, x.shape[:2]
        plain, rotated, _ = self.widths
        q_rows, kv_rows = attention._qkv_down_projection(x)
        kv_rows, k_rotated = kv_rows.split([model.kv_lora_rank, rotated], dim=-1)
        if model.q_lora_rank is not None:
            q_rows = attention.q_layernorm(q_rows)
        kv_rows = attention.kv_layernorm(kv_rows)
        layout = SequenceLayout(rows * self.group.size(), self.group.size(), "zigzag")
        angles, scale = _angles(attention.rotary_pos_emb, layout.length)
        order = _orders(layout, x.device)
        k_rotated = Reorder.apply(_Gather.apply(k_rotated, self.group), *order)
        queries = self._up(self.q_up, q_rows, order)
        keys = self._up(self.kv_up, kv_rows, order)
        heads = self.exchanges.heads
        mine = heads.num_heads // heads.world
        q = queries.view(layout.length, batch, mine, plain + rotated)
        q_plain, q_rotated = q.split([plain, rotated], dim=-1)
        k_plain, v = keys.view(layout.length, batch, mine, -1).split(
            [plain, self.widths[2]], dim=-1
        )
        turn = functools.partial(_rotate, angles, scale, model.rotary_interleaved)
        q = torch.cat([q_plain, turn(q_rotated)], dim=-1)
        k_rotated = turn(k_rotated.unsqueeze(2)).expand(-1, -1, mine, -1)
        k = torch.cat([k_plain, k_rotated], dim=-1)
        return attention.linear_proj(self._attend(q, k, v.contiguous(), rows))  # type: ignore[no-any-return]

    def _up(self, linear: Any, rows: Tensor, order: tuple[Tensor, Tensor]) -> Tensor:
        """[s, b, K] of each rank -> [S, b, columns of this rank's heads], by position."""
        if hasattr(linear, "layer_norm_weight"):
            rows = norm_of_rows(linear, rows)
        weight, ranks = linear.weight, self.group.size()
        mine = weight.shape[0] // ranks
        own = slice(self.group.rank() * mine, (self.group.rank() + 1) * mine)
        up = all_gather_matmul(
            rows.flatten(0, 1),
            weight[own],
            self.group,
            transpose_b=True,
            weight_grad=rows_gradient_of(linear, own),
        )
        assert isinstance(up, Tensor)
        whole: Tensor = Reorder.apply(up.view(-1, rows.shape[1], mine), *order)
        return whole

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
        """[S, b, heads of this rank, D or Dv] -> [s, b, n Dv]."""
        shape = rows, q.shape[1] * q.element_size(), "zigzag"
        exchange = self.exchanges.of_shape(*shape)
        heads, offset = exchange.heads, softmax_offset(self.core)
        kernel = core_kernel(self.core, heads.groups)
        case = CoreCase(q.shape[3], q.dtype, q.device.type, self.causal)
        first = heads.part(exchange.rank, 0).q_heads[0]

        def attended() -> Any:
            for group in range(heads.groups):
                part = heads.part(exchange.rank, group)
                own = slice(part.q_heads[0] - first, part.q_heads[-1] + 1 - first)
                mine = None if offset is None else offset[part.head_slice]
                y = kernel.run(q[:, :, own], k[:, :, own], v[:, :, own], case, mine)
                yield y.reshape(*q.shape[:2], len(part.q_heads), v.shape[3])

        return return_rows(exchange, attended())


class _Gather(torch.autograd.Function):
    """Few columns of the rows of every rank [s, b, C], rank by rank [S, b, C]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, rows.shape[0]
        rows = rows.contiguous()
        whole = rows.new_empty((rows.shape[0] * group.size(), *rows.shape[1:]))
        group_waits(group).collective(
            "latent attention's shared rows",
            lambda: dist.all_gather_into_tensor(whole, rows, group=group, async_op=True),
        )
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Each rank's is of its own heads. gloo knows no reduce-scatter, and the columns are few.
        total = grads[0].contiguous()
        group_waits(ctx.group).collective(
            "gradients of latent attention's shared rows",
            lambda: dist.all_reduce(total, group=ctx.group, async_op=True),
        )
        return total.narrow(0, ctx.group.rank() * ctx.rows, ctx.rows).clone(), None


@functools.lru_cache(maxsize=32)
def _orders(layout: SequenceLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """The gathered row of each position, and the position of each gathered row."""
    with torch.inference_mode(False):
        positions = layout.order(device)
        return torch.argsort(positions), positions


def _angles(rotary: Any, length: int) -> tuple[Tensor, float]:
    """Of all positions [S, 1, 1, R], and by what cosines and sines are multiplied (YaRN)."""
    # Of packed sequences Megatron does not cut them by rank.
    found = rotary(length, packed_seq=True)
    return found if isinstance(found, tuple) else (found, 1.0)


def _rotate(angles: Tensor, scale: float, interleaved: bool, x: Tensor) -> Tensor:
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    turned: Tensor = _apply_rotary_pos_emb_bshd(
        x, angles, interleaved, mla_rotary_interleaved=True, mscale=scale
    )
    return turned


class _LatentDecisions(OverlapDecisions[OverlappedLatentAttention]):
    """The negotiation of latent attention modules, over their context-parallel group."""

    feature, patch, setting = "overlapped latent attention", "latent-attention", "cp_backend"
    compared = ("params_dtype", "hidden_size", "q_lora_rank", "kv_lora_rank", "v_head_dim")

    def is_layer(self, module: Any) -> bool:
        from megatron.core.transformer.multi_latent_attention import MLASelfAttention

        return isinstance(module, MLASelfAttention)

    def concerns(self, layer: Any) -> bool:
        return self.is_layer(layer) and layer.pg_collection.cp.size() > 1

    def group(self, layer: Any) -> dist.ProcessGroup:
        group: dist.ProcessGroup = layer.pg_collection.cp
        return group

    def setting_reason(self, config: FluidConfig, layer: Any) -> str | None:
        if config.cp_backend in ("collective", "megatron"):
            return f"cp_backend={config.cp_backend} was asked for"
        reason = latent_setting_reason(layer.config, config) or self._core_reason(layer)
        if reason is not None:
            return reason
        exchanges = exchanges_of(layer.core_attention)
        assert exchanges is not None
        if exchanges.nvlink or config.cp_backend == "rounds" or cpu_mode_active():
            return None
        return exchanges.nvlink_unsupported_reason

    def _core_reason(self, layer: Any) -> str | None:
        if exchanges_of(layer.core_attention) is not None:
            return None
        return f"its {type(layer.core_attention).__name__} keeps its own exchange"

    def backend_of(self, config: FluidConfig, layer: Any) -> str:
        exchanges = exchanges_of(layer.core_attention)
        return "nvlink" if exchanges is not None and exchanges.nvlink else "collective"

    def describe(self, backend: str, layer: Any) -> str:
        how = "over NVLink" if backend == "nvlink" else "by collectives"
        return f"compressed rows are gathered {how}, beside the projections up"

    def announce(self, layer: Any, late: bool = False) -> Decision[OverlappedLatentAttention]:
        decision = super().announce(layer, late)
        if decision.backend is not None:
            CORE_REPORT.withdraw(layer.core_attention)
        return decision

    def built_reason(self, layer: Any) -> str | None:
        return module_reason(layer)

    def find(self, config: FluidConfig, layer: Any) -> Finding:
        reason = self._core_reason(layer) or module_reason(layer)
        if reason is None:
            modules = projected_up(layer) | {"core_attention": layer.core_attention}
            reason = ModuleHooks(**modules).foreign()
        return Finding(reason)

    def decide(
        self, config: FluidConfig, layer: Any, found: Sequence[Finding]
    ) -> OverlappedLatentAttention:
        machine = None
        if config.cp_backend == "auto":
            device = "cuda" if self.backend_of(config, layer) == "nvlink" else "cpu"
            machine = agreed_machine(self.group(layer), device, config.machine)
        return OverlappedLatentAttention(layer, config, machine)

    def allowed(self, config: FluidConfig, layer: Any, reason: str) -> str | None:
        return None  # heads are exchanged around its core attention all the same


DECISIONS = _LatentDecisions()
