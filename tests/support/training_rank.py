"""One rank of a training that a test asks for step by step (tests/support/training_world.py)."""

import contextlib
import dataclasses
import faulthandler
import functools
import inspect
import logging
import os
import pickle
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_fluid
from megatron_fluid import patches
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.patches.cpu.replacements import CPU_PATCHES
from tests.support.training_groups import Groups, shares_of
from tests.support.training_world import PARTS, Done, Setup, Shape

LOSS_SCALE = 128.0
_ACTION_S = 60.0  # bound of a collective and of the package's own waits
_PHASES = ("forward", "routed_experts_compute")  # of an MoE layer, which is called by them
_STUCK_S = 150.0  # a rank that takes longer says where it stands, and ends


class _Trainer:
    """One rank of one half, which is megatron_fluid's or not. Its public methods are what a test
    can ask for; what one gives, else `done`, is the answer."""

    def __init__(self, fluid: bool, groups: Groups) -> None:
        self._fluid, self._groups = fluid, groups
        self._rank, self._iteration = groups.rank, 0
        self._setup = Setup()
        self._frozen: set[str] = set()
        self._regulariser: tuple[str | tuple[str, ...], float, str] | None = None
        self._accumulated = False
        self._microbatch = self._started = 0
        self._aborted: Tensor | None = None
        self._clip = 1.0
        self._saved: Any = None
        self._full_recompute = False
        self._usage: dict[int, str] = {}
        self._logging: list[Any] = []

    def begin(self, setup: Setup) -> None:
        """Make the model, from the same random numbers every time."""
        self._drop()
        self.__init__(self._fluid, self._groups)  # type: ignore[misc]
        self._setup = setup
        if self._groups.expert_ranks != setup.expert_ranks:
            self._groups.make(setup.expert_ranks, whole=True)
        self._build()

    def train(
        self, shapes: Sequence[Shape], uneven: bool = False, spoiled: bool = False,
        aborted: bool = False,
    ) -> Done:  # fmt: skip
        """One iteration of a microbatch for each of `shapes`. `uneven`: later ranks have more
        sequences. `spoiled`: rank 0's loss is infinite. `aborted`: before each microbatch come two
        forwards without a backward; one lives on."""
        losses = self._microbatches(shapes, uneven, synced=True, spoiled=spoiled, aborted=aborted)
        self._finalize([self._ddp])
        if spoiled and not self._setup.distributed:
            return self.done(losses)  # no scaler: the caller leaves the step out
        stepped, norm, _ = self._optimizer.step()
        return self.done(losses, bool(stepped), None if norm is None else float(norm))

    def accumulate(self, shapes: Sequence[Shape]) -> Done:
        """Microbatches whose gradients the next iteration adds to."""
        return self.done(self._microbatches(shapes, False, synced=False))

    def evaluate(self, shape: Shape, inference: bool) -> Done:
        """The loss, without gradients."""
        with self._gathered():
            self._ddp.eval()
            with torch.inference_mode() if inference else torch.no_grad():
                losses = [float(self._loss(shape, 17))]
            self._ddp.train()
        if inference:  # Megatron keeps a table that it could not recompute with
            self._model.rotary_pos_emb.forward.cache_clear()
        return self.done(losses)

    def regularise(
        self, part: str | tuple[str, ...] | None, scale: float = 0.0, when: str = "always"
    ) -> None:
        """From now on the loss has a term of the weights of a part (of PARTS, or all words of their
        names), "always", in the "first" or the "last" microbatch only, or "before" the forward, so
        that its backward comes last; None: no more."""
        self._regulariser = None if part is None else (part, scale, when)

    def freeze(self, part: str) -> None:
        self._set_frozen(self._frozen | {part})

    def thaw(self) -> None:
        self._set_frozen(set())

    def clip(self, norm: float) -> None:
        """Clip gradients to that norm; 0: not at all."""
        self._clip = norm
        for optimizer in (self._optimizer, *self._optimizers()):
            optimizer.config.clip_grad = norm

    def recompute(self, on: bool) -> None:
        """Recompute whole layers in backward."""
        self._full_recompute = on
        self._set_recompute()

    def use(self, layer: int, how: str) -> None:
        """Call an MoE layer "once", "twice", not at all ("skip") or not in the first microbatch
        ("skip first"), or by Megatron's own forward ("megatron"), as where it is logged."""
        self._usage[layer] = how
        self._set_usage()

    def save(self) -> None:
        """Keep parameters and the optimizer's state."""
        self._saved = self._snapshot()

    def load(self) -> None:
        """Go back to what `save` kept."""
        if self._saved is not None:
            self._restore(self._saved)

    def restart(self, kind: str) -> None:
        """Make the model again from its own parameters and state, with the same groups but what the
        package keeps for them ("resources"), with new groups of Megatron ("model parallel"), or
        after the process group was destroyed ("all")."""
        snapshot = self._snapshot()
        self._drop()
        if kind == "resources":
            if self._fluid:
                from megatron.core import parallel_state

                megatron_fluid.close_group(parallel_state.get_expert_model_parallel_group())
        else:
            self._groups.make(self._setup.expert_ranks, whole=kind == "all")
        self._build()
        self._restore(snapshot)

    def log_activations(self, on: bool) -> None:
        """Keep inputs and outputs of linear layers and routers by the hooks of Megatron's logger,
        as --save-activations-interval does, whose list of modules needs Transformer Engine."""
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.moe.router import Router
        from megatron.training.activation_logging import ActivationLogger

        logger = ActivationLogger("")
        for handle in self._logging:
            handle.remove()
        self._logging = [
            module.register_forward_hook(logger._make_activation_hook("", name), with_kwargs=True)
            for name, module in self._model.named_modules()
            if on and isinstance(module, ColumnParallelLinear | RowParallelLinear | Router)
        ]

    def parameters(self) -> Done:
        """All parameters, gathered."""
        with self._gathered():
            return dataclasses.replace(self.done(), params=self._named())

    def _drop(self) -> None:
        """Let go of what holds process groups: each has threads that wake again and again. (The
        hooks of Megatron's DistributedDataParallel hold it, from where no collector looks.)"""
        if (ddp := getattr(self, "_ddp", None)) is not None:
            held = [*ddp.modules(), self._config, *self._optimizers(), self._optimizer]
            for holder in [*held, *ddp.buffers, *ddp.bucket_groups]:
                holder.__dict__.clear()
        self._model = self._ddp = self._optimizer = self._config = self._moe = None

    def _build(self) -> None:
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        from tests.support import tiny_gpt

        setup = self._setup
        destroy_moe_metrics_tracker()  # they are as long as the model before had layers
        MTPLossLoggingHelper.tracker.clear()
        if self._fluid:
            own = "local" if setup.expert_ranks == 1 else "rounds"
            backend = own if setup.backend == "own" else setup.backend
            set_config(FluidConfig(moe_backend=backend, timeout_s=_ACTION_S, **dict(setup.fluid)))
        settings: dict[str, Any] = {"hidden_size": 16, "ffn_hidden_size": 24}
        settings |= {"moe_ffn_hidden_size": 24, "num_attention_heads": 2}
        settings["gradient_accumulation_fusion"] = setup.fused
        if modules := list(setup.recompute):
            settings |= {"recompute_granularity": "selective", "recompute_modules": modules}
        if setup.mtp:
            settings |= {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
        self._config = tiny_gpt.config_of(**settings)
        self._model = tiny_gpt.gpt(self._config)
        self._moe = [m for m in self._model.modules() if isinstance(m, MoELayer)]
        if setup.tied:
            first = self._moe[0].experts
            for layer in self._moe[1:]:
                if setup.tied == "in parts":
                    layer.experts.local_experts[0] = first.local_experts[0]
                else:
                    layer.experts = first
        for part in self._frozen:
            self._require_grad(part, False)
        self._frozen_when_built = frozenset(self._frozen)
        [self._ddp], self._optimizer = tiny_gpt.wrapped(
            [self._model],
            self._config,
            distributed=setup.distributed,
            reduce=setup.overlap != "none",
            gather=setup.overlap == "reduce and gather",
            bucket_size=1000,
            lr=1e-2,
            adam_eps=1e-2,  # where a gradient is all rounding, the step must be so, too
            loss_scale=LOSS_SCALE,
            clip_grad=self._clip,
        )
        self._config.grad_scale_func = self._optimizer.scale_loss
        self._finalize = finalize_model_grads
        self._accumulated = False
        self._set_recompute()
        self._set_usage()

    def _optimizers(self) -> list[Any]:
        return list(getattr(self._optimizer, "chained_optimizers", [self._optimizer]))

    def _microbatches(
        self, shapes: Sequence[Shape], uneven: bool, synced: bool, spoiled: bool = False,
        aborted: bool = False,
    ) -> list[float]:  # fmt: skip
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        if not self._accumulated:
            self._ddp.zero_grad_buffer()
            self._optimizer.zero_grad()
        self._accumulated = not synced
        scale = self._optimizer.scale_loss(torch.ones(()))
        MoEAuxLossAutoScaler.set_loss_scale(scale / len(shapes))
        losses = []
        for i, (sequences, length) in enumerate(shapes):
            self._microbatch, last = i, synced and i == len(shapes) - 1
            if i == 0:
                self._model.set_is_first_microbatch()
            shape = sequences + (self._rank if uneven else 0), length
            with contextlib.nullcontext() if last else self._ddp.no_sync():
                if aborted:
                    self._aborted = self._loss(shape, i)
                    self._loss(shape, i)
                begun = self._weight_term("before")
                loss = self._loss(shape, i) + begun
                for when in ("always", "first" * (i == 0), "last" * (i == len(shapes) - 1)):
                    loss = loss + self._weight_term(when)
                losses.append(float(loss.detach()))
                if spoiled and last and self._rank == 0:
                    loss = loss * float("inf")
                self._optimizer.scale_loss(loss / len(shapes)).backward()
        groups = [*self._ddp.bucket_groups, *self._ddp.expert_parallel_bucket_groups]
        self._started = sum(group.grad_reduce_handle is not None for group in groups)
        self._iteration += 1
        return losses

    def _loss(self, shape: Shape, microbatch: int) -> Tensor:
        from tests.support.tiny_gpt import VOCABULARY

        seed = 1_000_003 * self._rank + 1009 * self._iteration + microbatch
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
        positions = torch.arange(shape[1]).unsqueeze(0).expand(shape[0], -1)
        mask = torch.triu(torch.ones(1, 1, shape[1], shape[1], dtype=torch.bool), 1)
        labels = (tokens * 5 + 1) % VOCABULARY
        per_token: Tensor = self._ddp(tokens, positions, mask, labels=labels)
        return per_token.float().mean()

    def _weight_term(self, when: str) -> Tensor | float:
        if self._regulariser is None or self._regulariser[2] != when:
            return 0.0
        part, scale, _ = self._regulariser
        terms = [p.square().sum() for p in self._part(part) if p.requires_grad]
        return scale * torch.stack(terms).sum() if terms else 0.0

    def _part(self, part: str | tuple[str, ...]) -> list[torch.nn.Parameter]:
        held = PARTS[part] if isinstance(part, str) else part
        return [p for n, p in self._model.named_parameters() if all(word in n for word in held)]

    def _require_grad(self, part: str, required: bool) -> None:
        for parameter in self._part(part):
            parameter.requires_grad_(required)

    def _set_frozen(self, frozen: set[str]) -> None:
        """With overlapped reductions Megatron waits for the gradients of every parameter that it
        was given, so the model is wrapped again, and the optimizer starts afresh."""
        if self._setup.overlap != "none":
            snapshot = self._snapshot()
            self._drop()
            self._frozen = frozen
            self._build()
            self._restore(snapshot)
            return
        for part in self._frozen - frozen:
            self._require_grad(part, True)
        changed, self._frozen = self._frozen ^ frozen, frozen
        for part in frozen:
            self._require_grad(part, False)
        if self._fluid and "one expert" in changed:  # asked for where experts are no longer alike
            patches.reset_layers()

    def _set_recompute(self) -> None:
        config = self._config
        if not self._setup.recompute:
            how = ("full", "uniform", 1) if self._full_recompute else (None,) * 3
            config.recompute_granularity, config.recompute_method, config.recompute_num_layers = how

    def _set_usage(self) -> None:
        for number, layer in enumerate(self._moe):
            for name in _PHASES:
                layer.__dict__.pop(name, None)
            how = self._usage.get(number, "once")
            if how.startswith("skip"):
                layer.forward = self._skipping(layer.forward, how == "skip first")
            elif how == "twice":
                layer.forward = _twice(layer.forward)
            for name in _PHASES if how == "megatron" else ():
                own = inspect.unwrap(getattr(type(layer), name))
                setattr(layer, name, functools.partial(own, layer))

    def _skipping(self, forward: Callable[..., Any], first: bool) -> Callable[..., Any]:
        def skipping(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if first and self._microbatch:
                return forward(hidden, *args, **kwargs)
            return hidden * 0.5, None

        return skipping

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        """Parameters are whole inside, as Megatron has them to evaluate and to save."""
        lazily = self._setup.overlap == "reduce and gather"
        if lazily:
            self._ddp.disable_forward_pre_hook()
        yield
        if lazily:
            self._ddp.enable_forward_pre_hook()

    def _named(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self._model.named_parameters()}

    def _snapshot(self) -> Any:
        with self._gathered():
            params = {n: t.clone() for n, t in self._model.state_dict().items() if t is not None}
        states = [pickle.dumps(each.optimizer.state_dict()) for each in self._optimizers()]
        return params, self._frozen_when_built, states

    def _restore(self, snapshot: Any) -> None:
        params, frozen, states = snapshot
        with self._gathered():
            self._model.load_state_dict(params)
            if frozen == self._frozen_when_built:  # else the optimizer has other parameters
                for optimizer, state in zip(self._optimizers(), states, strict=True):
                    optimizer.optimizer.load_state_dict(pickle.loads(state))
            self._optimizer.reload_model_params()

    def done(
        self, losses: Sequence[float] = (), stepped: bool | None = None, norm: float | None = None
    ) -> Done:
        """Parameters are as they are right now; gathered late: this rank's share."""
        from tests.support.tiny_gpt import expert_order

        served = all(expert_order(layer) is not None for layer in self._moe)
        late = self._setup.overlap == "reduce and gather"
        params = shares_of(self._ddp) if late else self._named()
        return Done(list(losses), stepped, norm, params, started=self._started, served=served)


def _twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    def twice(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        first, _ = forward(hidden, *args, **kwargs)
        return forward(first + hidden, *args, **kwargs)

    return twice


def serve(rank: int, world_size: int, ports: tuple[int, int, int]) -> None:
    """Do what the test asks for until it asks for nothing more. `ports` are of the stores of
    megatron_fluid's half, of Megatron's, and of the test."""
    from megatron.core.tensor_parallel import layers

    logging.getLogger("megatron").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    ranks = world_size // 2
    fluid, own = rank < ranks, rank % ranks
    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(dict.fromkeys(names[0], str(own)) | dict.fromkeys(names[1], str(ranks)))
    from tests.support import tiny_gpt  # noqa: F401 (imports all of Megatron that is patched)

    if fluid:
        patches.apply_all()
    else:
        cpu_mode = {patch.name for patch in CPU_PATCHES}
        patches.disable(*(p.name for p in patches.PATCHES if p.name not in cpu_mode))
    # Megatron's kernel (Apex) is for GPUs.
    kernel = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=lambda x, dy, main_grad: main_grad.addmm_(dy.t(), x)
    )
    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = kernel

    trainer = _Trainer(fluid, Groups(ports[0 if fluid else 1], own, ranks, _ACTION_S))
    control = dist.TCPStore("127.0.0.1", ports[2], is_master=False, timeout=timedelta(hours=2))
    number = 0
    while True:
        control.wait([f"ask {number}"])
        asked = pickle.loads(control.get(f"ask {number}"))
        if asked is None:
            return
        faulthandler.dump_traceback_later(_STUCK_S, exit=True)
        try:
            for name, arguments in asked:
                done = getattr(trainer, name)(**arguments) or trainer.done()
        except Exception:  # noqa: BLE001 (handed back)
            done = Done(error=traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        control.set(f"done {number} {rank}", pickle.dumps(done))
        number += 1
