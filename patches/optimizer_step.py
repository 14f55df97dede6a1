"""Megatron's clipping, Transformer Engine's Adam and the copy of new parameters into the model, in
one launch (kernels/adam.py), with the same bits. Only with --fluid-fused-optimizer.

One after the other the three read and write 42 bytes a parameter, in one launch 30. Host time falls
too: each of the three makes lists of all parameters in every step. Measured:
docs/tuning_notes.md#optimizer.

Megatron clips before it steps, by a list of parameters. If the list is all of an optimizer's, the
factor is left for that optimizer's next step, and the gradients stay unclipped in memory.

Left to Megatron: the first step, in which Adam makes its moments; other optimizers and other
settings of this one (precision-aware, capturable, offloaded), gradients or moments that are not
fp32, Megatron-FSDP, quantised parameters.

Private parts of Megatron that are read: DistributedOptimizer's `shard_fp32_*_groups`,
`model_*_groups`, `buffers`, `model_param_gbuf_map`, `_get_model_param_range_map`,
`_is_distopt_quantized_param`, and Transformer Engine's FusedAdam (its groups, state and settings).
"""

from __future__ import annotations

import functools
import itertools
import operator
import struct
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_fluid.cuda.triton_launch import Launcher

__all__ = ["clip_later", "step_in_one_pass"]

_BLOCK, _WARPS = 2048, 8  # measured: docs/tuning_notes.md#optimizer
_MOST_PROGRAMS = (1 << 31) - 1
_KINDS = (torch.bfloat16, torch.float16)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_grad = operator.attrgetter("grad")
# Optimizers by the id of their first parameter: Megatron clips a list of all of an optimizer's
# parameters, without naming the optimizer.
_steppers: weakref.WeakValueDictionary[int, _OnePass] = weakref.WeakValueDictionary()


def step_in_one_pass(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap `MixedPrecisionOptimizer.step_with_ready_grads`."""

    @functools.wraps(original)
    def fluid_step(self: Any) -> bool:
        kept: _OnePass | None = self.__dict__.get("_fluid_one_pass")
        if kept is not None and kept.current():
            kept.run()
            return True
        if kept is not None:
            kept.clip_now()
        done = original(self)
        if kept is not None or "_fluid_one_pass" not in self.__dict__:
            self._fluid_one_pass = _one_pass(self)
        return done

    return fluid_step


def clip_later(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `clip_grad_by_total_norm_fp32` of megatron.core.optimizer.optimizer."""

    @functools.wraps(original)
    def fluid_clip(
        parameters: Iterable[Tensor] | Tensor,
        max_norm: float,
        total_norm: float | Tensor,
        use_decoupled_grad: bool = False,
    ) -> None:
        whole = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        kept = _steppers.get(id(whole[0])) if whole else None
        if kept is not None and not use_decoupled_grad and kept.takes(whole):
            kept.leave(max_norm / (total_norm + 1.0e-6))
            return
        original(whole, max_norm, total_norm, use_decoupled_grad)

    return fluid_clip


def _one_pass(optimizer: Any) -> _OnePass | None:
    """What steps in place of `optimizer` from now on. None, with a warning, if Megatron has to."""
    inner = getattr(optimizer, "optimizer", None)
    # Only DistributedOptimizer has the attribute: others copy parameters in ways of their own.
    if not hasattr(optimizer, "shard_fp32_from_float16_groups"):
        return _no_effect("needs --use-distributed-optimizer")
    if not is_plain(optimizer) or optimizer.config.reuse_grad_buf_for_mxfp8_param_ag:
        return _no_effect(
            "needs parameters that are not quantised, and neither Megatron-FSDP nor the "
            "precision-aware optimizer"
        )
    if not _is_plain_adam(inner):
        return _no_effect("needs Transformer Engine's Adam with moments in fp32, not capturable")
    found = _OnePass(optimizer)
    if not found.whole:
        return _no_effect("needs gradients and moments on the GPU in fp32, each dense")
    _steppers[id(found.params[0])] = found
    return found


@functools.cache  # once a reason, of the several optimizers that Megatron chains
def _no_effect(reason: str) -> None:
    warnings.warn(
        f"megatron_fluid: --fluid-fused-optimizer has no effect on an optimizer: {reason}",
        stacklevel=2,
    )


def _is_plain_adam(inner: Any) -> bool:
    kind = type(inner)
    if kind.__name__ != "FusedAdam" or not kind.__module__.startswith("transformer_engine."):
        return False
    other = inner.capturable or inner.master_weights or inner.use_decoupled_grad
    moments = {inner.exp_avg_dtype, inner.exp_avg_sq_dtype}
    return not other and moments == {torch.float32} and "step" not in inner.__dict__


def is_plain(optimizer: Any) -> bool:
    """Whether a distributed optimizer copies between its fp32 shards and DDP's buffers, and does
    nothing else."""
    config, ddp = optimizer.config, getattr(optimizer, "ddp_config", None)
    return not (
        optimizer.is_stub_optimizer
        or ddp is None
        or ddp.use_megatron_fsdp
        or ddp.fp8_param_gather
        or ddp.fp4_param_gather
        or config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    )


def _same_objects(found: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether both hold the same objects. Runs over a thousand objects in every step: map, since
    its loop is in C."""
    return len(found) == len(known) and all(map(operator.is_, found, known))


def model_slices(optimizer: Any) -> tuple[list[tuple[Tensor, Tensor]], dict[Any, int]] | None:
    """Where a distributed optimizer copies its fp32 shards: (shard, slice of DDP's parameter
    buffers) of each, and the addresses of the buckets that hold the slices. None where Megatron
    copies some of them in another way."""
    from megatron.core.fp4_utils import is_nvfp4tensor

    chain, buffers = itertools.chain.from_iterable, optimizer.buffers
    groups = optimizer.shard_fp32_from_float16_groups, optimizer.shard_fp32_groups
    shards = [*chain(map(chain, groups))]
    models = [*chain(map(chain, (optimizer.model_float16_groups, optimizer.model_fp32_groups)))]
    if len(shards) != len(models):
        return None
    addresses: dict[Any, int] = {}
    pairs: list[tuple[Tensor, Tensor]] = []
    for shard, model in zip(shards, models, strict=True):
        if optimizer._is_distopt_quantized_param(model) or is_nvfp4tensor(model):
            return None
        number, _, index = optimizer.model_param_gbuf_map[model]
        bucket = buffers[number].buckets[index]
        addresses[bucket] = bucket.param_data.data_ptr()
        span = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
        assert span.size == shard.nelement()
        part = bucket.param_data.view(-1)[span.start : span.end].data
        pairs.append((shard, part))
    return pairs, addresses


class _OnePass:
    """The tensors of an optimizer's parameters by address, as they were when it was made.

    Attributes:
        params: in the order of the optimizer's groups.
        whole: whether it does all that Megatron would do.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._inner = optimizer, optimizer.optimizer
        self.params = [p for group in self._inner.param_groups for p in group["params"]]
        self._scale: Tensor | None = None  # of the gradients, left by a clipping for the next step
        self._scaled: tuple[Tensor | None, int] = None, 0  # the gradients that it was left for
        slices = model_slices(optimizer)
        self.whole = bool(self.params) and self._fit()
        if slices is None or not self.whole:
            self.whole = False
            return
        pairs, self._buckets = slices
        targets = {id(shard): part for shard, part in pairs}
        self._owners = list(self._inner.state)
        self._known = self._addresses()
        if self._known is None:  # the state holds more than these parameters' moments
            self.whole = False
            return
        self._one = torch.ones(1, dtype=torch.float32, device=self.params[0].device)
        self._launches: list[list[tuple[torch.dtype | None, Tensor, Tensor]]] = []
        for group in self._inner.param_groups:
            by_kind: dict[torch.dtype | None, list[tuple[Tensor | None, ...]]] = {}
            for param in group["params"]:
                state, target = self._inner.state[param], targets.get(id(param))
                if target is not None and target.data_ptr() == param.data_ptr():
                    target = None  # the model's parameter is the one that Adam writes
                self.whole &= target is None or target.dtype in _KINDS
                line = (param.grad, param, state["exp_avg"], state["exp_avg_sq"], target)
                by_kind.setdefault(None if target is None else target.dtype, []).append(line)
            tables = {kind: _table(lines) for kind, lines in by_kind.items()}
            self._launches.append([(k, *table) for k, table in tables.items() if table is not None])
            self.whole &= None not in tables.values()
        self.whole &= len(targets) == len(self.params)

    def _fit(self) -> bool:
        """Whether every parameter is dense and in fp32, and so are its gradient and moments."""
        for param in self.params:
            state = self._inner.state.get(param) or {}
            for t in (param, param.grad, state.get("exp_avg"), state.get("exp_avg_sq")):
                if t is None or type(t) not in (Tensor, torch.nn.Parameter):
                    return False
                if not t.is_contiguous():
                    return False
                if t.dtype != torch.float32 or t.numel() != param.numel() or not _runs_on(t):
                    return False
        return True

    def _addresses(self) -> list[list[int]] | None:
        """Where all lies, moments in the order of the optimizer's state: to look a tensor up in it
        costs more than all else here. None if a tensor is missing."""
        parts, repeat = list(self._inner.state.values()), itertools.repeat
        moments = [list(map(dict.get, parts, repeat(name))) for name in _MOMENTS]
        columns = [list(map(_grad, self.params)), self.params, *moments]
        # Not `None in`: that asks each tensor whether it equals None, which takes over 10 us each.
        if any(any(map(operator.is_, column, repeat(None))) for column in columns):
            return None
        return [list(map(Tensor.data_ptr, column)) for column in columns]

    def current(self) -> bool:
        """Whether all lies where it did, and nobody else steps this optimizer."""
        params = [p for group in self._inner.param_groups for p in group["params"]]
        if not _same_objects(params, self.params) or "step" in self._inner.__dict__:
            return False
        if self._optimizer.optimizer is not self._inner:
            return False
        if not _same_objects(list(self._inner.state), self._owners):
            return False
        buckets = self._buckets.items()
        moved = any(bucket.param_data.data_ptr() != address for bucket, address in buckets)
        return not moved and self._addresses() == self._known

    def takes(self, params: Sequence[Tensor]) -> bool:
        """Whether `params` are all parameters of the optimizer."""
        return _same_objects(params, self.params)

    def leave(self, factor: float | Tensor) -> None:
        """Have the next step scale gradients by `factor` if that is below one, as Megatron does.

        Clipped twice before a step, gradients get the smaller factor: both were computed from
        gradients that are not scaled yet. A factor whose step was left out is dropped once the
        gradients have been zeroed or written by torch.

        Args:
            factor: a number, or fp32 [1] on the device, which the host does not read.
        """
        # The object, too: gradients that are cast from bf16 are new ones of the same version.
        grad, version = self._first_gradient()
        same = grad is self._scaled[0] and version == self._scaled[1]
        before = self._scale if same else None
        if isinstance(factor, Tensor):
            scale = factor.clamp_max(1.0)
        elif factor < 1.0:
            scale = torch.full_like(self._one, factor)
        else:
            scale = None
        if before is not None:
            scale = before if scale is None else torch.minimum(before, scale.view_as(before))
        self._scale, self._scaled = scale, (grad, version)

    def _first_gradient(self) -> tuple[Tensor | None, int]:
        """The first parameter's gradient, which stands for all, and its version."""
        grad = self.params[0].grad
        return grad, 0 if grad is None else grad._version

    def _taken(self) -> Tensor | None:
        """The factor that was left; from then on there is none."""
        scale, self._scale, self._scaled = self._scale, None, (None, 0)
        return scale

    def clip_now(self) -> None:
        """Scale the gradients themselves, for a step that is Megatron's."""
        if (scale := self._taken()) is not None:
            grads = [param.grad for param in self.params if param.grad is not None]
            torch._foreach_mul_(grads, scale.view(()))

    def run(self) -> None:
        """Clip, step, and copy into the model. All timers of Megatron's step start, although one
        launch does it all: a start may be a barrier, and other ranks' steps may be Megatron's."""
        config = self._optimizer.config
        for name in ("optimizer-inner-step", "optimizer-copy-main-to-model-params"):
            if config.timers is not None:
                config.timers(name, log_level=1).start(barrier=config.barrier_with_L1_time)
            if name == "optimizer-inner-step":
                _hooked_step(self._inner, self)
            if config.timers is not None:
                config.timers(name).stop()

    def step(self) -> None:
        """FusedAdam.step, and the copies."""
        taken = self._taken()
        scale = self._one if taken is None else taken
        for group, launches in zip(self._inner.param_groups, self._launches, strict=True):
            group["step"] += 1
            numbers = _numbers(group)
            for kind, lines, chunks in launches:
                launch, constants = _adam(kind, bool(self._inner.adam_w_mode))
                launch(chunks.shape[0], (lines, chunks, scale, *numbers), **constants)


def _runs_on(tensor: Tensor) -> bool:
    return tensor.is_cuda


# With the hooks that torch runs around every optimizer's step.
_hooked_step = torch.optim.Optimizer.profile_hook_step(lambda inner, kept: kept.step())


@functools.cache
def _adam(kind: torch.dtype | None, decoupled: bool) -> tuple[Launcher, dict[str, object]]:
    """The kernel, and its constants in its own order, for a model of this dtype, None for that of
    Adam's shards. decoupled: AdamW's decay."""
    import triton
    import triton.language as tl

    from megatron_fluid.cuda.triton_launch import Launcher
    from megatron_fluid.kernels.adam import adam_kernel

    dtype = {None: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[kind]
    constants = {"KIND": dtype, "DECOUPLED": decoupled, "BLOCK": _BLOCK}
    constants["PLAIN"] = bool(triton.knobs.runtime.interpret)
    return Launcher(adam_kernel, _WARPS), constants


def _table(lines: Sequence[tuple[Tensor | None, ...]]) -> tuple[Tensor, Tensor] | None:
    """The kernel's table and chunks of parameters, each a line with its gradient, moments and the
    model's parameter or None. None if the kernel cannot take them."""
    rows = [[0 if t is None else t.data_ptr() for t in line] for line in lines]
    sizes = [line[1].numel() for line in lines]  # type: ignore[union-attr]
    device = lines[0][1].device  # type: ignore[union-attr]
    counts = torch.tensor([-(-size // _BLOCK) for size in sizes])
    owner = torch.repeat_interleave(torch.arange(len(rows)), counts)
    if len(owner) > _MOST_PROGRAMS or any(a & 15 for row in rows for a in row):
        return None
    number = torch.arange(len(owner)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    table = [[*row, size] for row, size in zip(rows, sizes, strict=True)]
    chunks = torch.stack([owner, number], 1).int().to(device)
    return torch.tensor(table, dtype=torch.int64).to(device), chunks


def _bits(value: float) -> int:
    """The bits of an fp32 number that is not negative."""
    found: int = struct.unpack("=I", struct.pack("=f", value))[0]
    return found


def _numbers(group: dict[str, Any]) -> tuple[int, ...]:
    """The kernel's numbers, each rounded where Transformer Engine rounds it."""
    fp32 = torch.tensor([*group["betas"]], dtype=torch.float32)
    rest = (1 - fp32).tolist()
    beta1, beta2 = fp32.tolist()
    correction1 = correction2 = 1.0
    if group["bias_correction"]:
        correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
    moments = (beta1, rest[0], beta2, rest[1], correction1, correction2)
    return tuple(map(_bits, (*moments, group["eps"], group["weight_decay"], group["lr"])))
