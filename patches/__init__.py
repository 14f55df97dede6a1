"""READ THIS FIRST: the table PATCHES is the whole contact surface between megatron_fluid and
Megatron.

`import megatron_fluid` calls `arm()`: from then on each Megatron module named in the table is
patched right after its import, whether that import comes later or came before. Nothing is imported
for it, so it costs nothing without Megatron. `megatron-fluid patches` prints the table with its
state; engine.py says how it is applied, checked and reverted.

To add a patch: write a factory `def name(original): ... return new` in a file of this folder, which
calls `original` for everything it does not serve, and add a row with the signature it was written
for. A factory's module must not import Megatron at its top (it is itself imported while Megatron is
being imported); inside functions it may.

    def forward(original):
        @functools.wraps(original)
        def fluid_forward(self, hidden_states, *args, **kwargs):
            ...
        return fluid_forward

A patch that does not fit the Megatron found is left out, with those that require it; versions.py
has what older versions lack.

Prefer a method of a class over a function of a module: others hold functions by value. (Where one
must be replaced, the engine also replaces it in every Megatron module that holds it.)
"""

import functools
import importlib
import importlib.util
import sys
from typing import Any

from megatron_fluid.patches.children import reach_children
from megatron_fluid.patches.cpu.replacements import CPU_PATCHES
from megatron_fluid.patches.engine import switches
from megatron_fluid.patches.engine.engine import Engine
from megatron_fluid.patches.engine.patch import Patch, Row
from megatron_fluid.patches.versions import SETTING_PATCHES

__all__ = [
    "PATCHES",
    "SUPPORTED_MEGATRON",
    "Engine",
    "Patch",
    "Row",
    "apply_all",
    "arm",
    "count_instance",
    "check_names",
    "disable",
    "is_applied",
    "megatron_installed",
    "megatron_version",
    "patched",
    "report",
    "report_at_first_forward",
    "reset_layers",
    "revert",
    "version_problem",
    "off_reason",
]

SUPPORTED_MEGATRON = ">=0.16,<0.21"


def _transformer_engine_works() -> bool:
    """Whether Megatron found Transformer Engine; before Megatron has looked, whether it is
    installed."""
    looked = sys.modules.get("megatron.core.extensions.transformer_engine")
    if looked is not None:
        return bool(looked.HAVE_TE)
    return importlib.util.find_spec("transformer_engine") is not None


_WITH_TRANSFORMER_ENGINE: dict[str, Any] = {
    "when": _transformer_engine_works,
    "condition": "where Transformer Engine is installed",
}


def _apex_is_missing() -> bool:
    """Whether Megatron's linears, once imported, have not found Apex's extension."""
    return "fused_weight_gradient_mlp_cuda" not in sys.modules


_WITHOUT_APEX: dict[str, Any] = {
    "when": _apex_is_missing,
    "condition": "where Apex's fused_weight_gradient_mlp_cuda cannot be imported",
}

_FUSED_OPTIMIZER: dict[str, Any] = {
    "when": functools.partial(switches.asked, "fused_optimizer"),
    "condition": "with --fluid-fused-optimizer",
}

PATCHES: tuple[Patch, ...] = (
    Patch(
        name="arguments",
        target="megatron.training.arguments:parse_args",
        signature="(extra_args_provider=None, ignore_unknown_args=False)",
        replacement="megatron_fluid.patches.arguments:parse_args",
        reason="adds the --fluid-* flags to an unchanged training script",
    ),
    Patch(
        name="peer-watch",
        target="megatron.training.training:pretrain",
        replacement="megatron_fluid.patches.failed_waits:pretrain",
        reason="a collective of Megatron that waits for a rank which is gone names neither rank "
        "nor operation",
    ),
    Patch(
        name="startup-table",
        target="megatron.training.training:setup_model_and_optimizer",
        replacement="megatron_fluid.patches.startup_report:setup_model_and_optimizer",
        reason="prints once, on rank 0, what is patched and which features are on",
    ),
    Patch(
        name="profile-steps",
        target="megatron.training.training:train_step",
        replacement="megatron_fluid.patches.profile_steps:train_step",
        reason="draws the steps that --fluid-profile-steps names, and logs speed to TensorBoard; "
        "Megatron offers no hook around a step",
    ),
    Patch(
        name="failed-waits-gradients",
        target="megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        replacement="megatron_fluid.patches.failed_waits:finalize_model_grads",
        reason="a wait for a peer that timed out is raised before gradients are reduced",
    ),
    Patch(
        name="failed-waits-graphed-step",
        target="megatron.core.optimizer.optimizer_cuda_graph:OptimizerCudaGraphWrapper.__call__",
        replacement="megatron_fluid.patches.failed_waits:graphed_step",
        reason="the same before the optimizer steps by a CUDA graph, whose replay runs no hook",
    ),
    Patch(
        name="failed-waits-checkpoint",
        target="megatron.training.checkpointing:save_checkpoint",
        replacement="megatron_fluid.patches.failed_waits:save_checkpoint",
        reason="the same before a checkpoint is written",
    ),
    Patch(
        name="iteration-graph",
        target="megatron.core.full_cuda_graph:FullCudaGraphWrapper.__call__",
        signature="(self, *args, **kwargs)",
        replacement="megatron_fluid.patches.iteration_graph:graphed_iteration",
        reason="an iteration that sends a rank more expert rows than its graph has room for runs "
        "again, eagerly, before the optimizer steps",
    ),
    Patch(
        name="read-ahead",
        target="megatron.training.datasets.data_samplers:build_pretraining_data_loader",
        signature="(dataset, consumed_samples)",
        replacement="megatron_fluid.patches.iteration_graph:read_ahead",
        reason="the graph of an iteration starts when all its microbatches have been read, of "
        "which data loaders have few ready",
    ),
    Patch(
        name="dataset-helpers",
        target="megatron.core.datasets.utils:compile_helpers",
        signature="()",
        replacement="megatron_fluid.patches.dataset_helpers:compile_helpers",
        reason="the wheel has its dataset helpers compiled but no Makefile, so Megatron's own call "
        "of make ends the job",
    ),
    Patch(
        name="context-parallel-attention",
        target="megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        signature="(self, config, layer_number, attn_mask_type, attention_type, "
        "attention_dropout=None, softmax_scale=None, cp_comm_type=None, pg_collection=None)",
        replacement="megatron_fluid.patches.attention.core:dot_product_attention",
        reason="the local attention refuses context parallelism; with cp_comm_type a2a it "
        "exchanges heads and sequence",
    ),
    Patch(
        name="context-parallel-te-attention",
        target="megatron.core.extensions.transformer_engine:TEDotProductAttention.__init__",
        signature="(self, config, layer_number, attn_mask_type, attention_type, "
        "attention_dropout=None, softmax_scale=None, k_channels=None, v_channels=None, "
        "num_splits=None, cp_comm_type='p2p', pg_collection=None)",
        replacement="megatron_fluid.patches.attention.transformer_engine:te_dot_product_attention",
        reason="with cp_comm_type a2a, heads and sequence are exchanged over NVLink instead of "
        "NCCL with permutations",
        **_WITH_TRANSFORMER_ENGINE,
    ),
    Patch(
        name="self-attention-init",
        requires=("self-attention",),
        target="megatron.core.transformer.attention:SelfAttention.__init__",
        signature="(self, config, submodules, layer_number, attn_mask_type=None, "
        "cp_comm_type=None, pg_collection=None, pp_layer_offset=None, name=None)",
        replacement="megatron_fluid.patches.attention.self_attention:init",
        reason="reports at start-up which attention layers overlap their projections, and refuses "
        "rounds that cannot be had",
    ),
    Patch(
        name="self-attention",
        target="megatron.core.transformer.attention:Attention.forward",
        signature="(self, hidden_states, attention_mask, key_value_states=None, "
        "inference_context=None, rotary_pos_emb=None, rotary_pos_cos=None, rotary_pos_sin=None, "
        "rotary_pos_cos_sin=None, attention_bias=None, packed_seq_params=None, "
        "sequence_len_offset=None, *, inference_params=None)",
        replacement="megatron_fluid.patches.attention.self_attention:forward",
        reason="overlaps projections with the exchanges of heads; the module offers no hook "
        "between them",
    ),
    Patch(
        name="latent-attention-init",
        requires=("latent-attention",),
        target="megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__",
        signature="(self, config, submodules, layer_number, attn_mask_type=None, "
        "cp_comm_type=None, pg_collection=None, pp_layer_offset=None, name=None)",
        replacement="megatron_fluid.patches.attention.latent:init",
        reason="reports at start-up which latent attention layers overlap their projections",
    ),
    Patch(
        name="latent-attention",
        target="megatron.core.transformer.multi_latent_attention:MultiLatentAttention.forward",
        signature="(self, hidden_states, attention_mask, key_value_states=None, "
        "inference_context=None, rotary_pos_emb=None, rotary_pos_cos=None, rotary_pos_sin=None, "
        "rotary_pos_cos_sin=None, attention_bias=None, packed_seq_params=None, position_ids=None, "
        "sequence_len_offset=None, *, inference_params=None)",
        replacement="megatron_fluid.patches.attention.latent:forward",
        reason="gathers compressed rows in place of exchanging heads; the module offers no hook "
        "before its projections up",
    ),
    Patch(
        name="moe-layer-init",
        requires=("moe-layer",),
        target="megatron.core.transformer.moe.moe_layer:MoELayer.__init__",
        signature="(self, config, submodules=None, layer_number=None, pg_collection=None, "
        "is_mtp_layer=False, name=None)",
        replacement="megatron_fluid.patches.moe.layer:init",
        reason="reports at start-up which MoE layers are overlapped, and refuses a backend that "
        "cannot be had",
    ),
    Patch(
        name="moe-layer",
        target="megatron.core.transformer.moe.moe_layer:MoELayer.forward",
        signature="(self, hidden_states, intermediate_tensors=None, padding_mask=None)",
        replacement="megatron_fluid.patches.moe.layer:forward",
        reason="dispatch, experts and combine overlapped, in models whose layer specs are "
        "Megatron's own",
    ),
    Patch(
        name="moe-experts",
        target="megatron.core.transformer.moe.moe_layer:MoELayer.routed_experts_compute",
        signature="(self, hidden_states, probs)",
        replacement="megatron_fluid.patches.moe.layer:routed_experts_compute",
        reason="megatron_fluid's experts where exchange and experts run one after the other",
    ),
    Patch(
        name="moe-delayed-gradients",
        target="megatron.core.transformer.moe.moe_layer:MoELayer.backward_dw",
        signature="(self, routed_experts=True, shared_experts=False)",
        replacement="megatron_fluid.patches.moe.layer:backward_dw",
        reason="the 1F1B expert overlap asks here for weight gradients that it delays, also "
        "those of megatron_fluid's experts",
    ),
    Patch(
        name="moe-router-topk",
        target="megatron.core.transformer.moe.moe_utils:topk_routing_with_score_function",
        signature="(logits, topk, use_pre_softmax=False, num_groups=None, group_topk=None, "
        "scaling_factor=None, score_function='softmax', expert_bias=None, fused=False, "
        "router_replay=None, dense_output=False, precomputed_indices=None)",
        replacement="megatron_fluid.patches.moe.layer:topk_routing",
        reason="the NVLink path takes the chosen experts as they are; the router asks for dense "
        "maps of them",
    ),
    Patch(
        name="gradient-readiness",
        requires=("gradient-readiness-count",),
        target="megatron.core.distributed.distributed_data_parallel:"
        "DistributedDataParallel._make_backward_post_hook",
        signature="(self, param)",
        replacement="megatron_fluid.patches.gradient_readiness:backward_post_hook",
        reason="gradients that bypass autograd are reported in one call for a layer, without a "
        "visit of autograd for each of hundreds of parameters",
    ),
    Patch(
        name="gradient-readiness-count",
        requires=("gradient-readiness",),
        target="megatron.core.distributed.param_and_grad_buffer:"
        "_ParamAndGradBucketGroup.register_grad_ready",
        signature="(self, param, force_all_reduce=False)",
        replacement="megatron_fluid.patches.gradient_readiness:register_grad_ready",
        reason="a parameter with gradients of autograd and of this package is ready once, after "
        "the last of them",
    ),
    Patch(
        name="optimizer-step",
        requires=("optimizer-clipping",),
        target="megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step_with_ready_grads",
        signature="(self)",
        replacement="megatron_fluid.patches.optimizer_step:step_in_one_pass",
        reason="clipping, Adam and the copy into the model move 42 bytes a parameter one after the "
        "other, and 30 in one launch",
        **_FUSED_OPTIMIZER,
    ),
    Patch(
        name="optimizer-clipping",
        requires=("optimizer-step",),
        target="megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
        signature="(parameters, max_norm, total_norm, use_decoupled_grad=False)",
        replacement="megatron_fluid.patches.optimizer_step:clip_later",
        reason="the factor goes to the step that follows, which reads the gradients anyway",
        **_FUSED_OPTIMIZER,
    ),
    Patch(
        name="column-parallel-linear",
        target="megatron.core.tensor_parallel.layers:ColumnParallelLinear._forward_impl",
        signature="(self, input, weight, *args, **kwargs)",
        replacement="megatron_fluid.patches.linears:column_forward_impl",
        reason="the gather of the sequence hidden behind the GEMM; the layer offers no hook "
        "between them",
    ),
    Patch(
        name="row-parallel-linear",
        target="megatron.core.tensor_parallel.layers:RowParallelLinear.forward",
        signature="(self, input_)",
        replacement="megatron_fluid.patches.linears:row_forward",
        reason="the reduce-scatter of the sequence hidden behind the GEMM; the layer offers no "
        "hook between them",
    ),
    Patch(
        name="weight-gradient-kernel",
        target="megatron.core.tensor_parallel.layers:fused_weight_gradient_mlp_cuda",
        replacement="megatron_fluid.patches.fused_weight_gradients:stand_in",
        adds=True,
        reason="without Apex's extension the linears cannot add weight gradients to main_grad",
        **_WITHOUT_APEX,
    ),
    Patch(
        name="gradient-accumulation-fusion",
        requires=("weight-gradient-kernel",),
        target="megatron.core.tensor_parallel.layers:_grad_accum_fusion_available",
        replacement="megatron_fluid.patches.fused_weight_gradients:availability",
        reason="without Apex's extension the setting is refused for the whole model, Transformer "
        "Engine's linears too, which do not need it",
        **_WITHOUT_APEX,
    ),
    Patch(
        name="deferred-embedding-gradients",
        requires=("weight-gradient-kernel",),
        target="megatron.core.utils:drain_embedding_wgrad_compute",
        signature="(config, embedding_activation_buffer, grad_output_buffer, weight, tp_group)",
        replacement="megatron_fluid.patches.fused_weight_gradients:drain_embedding_gradients",
        trigger="megatron.core.tensor_parallel.layers",
        reason="--defer-embedding-wgrad-compute imports Apex's extension by itself",
        **_WITHOUT_APEX,
    ),
    Patch(
        name="te-linear",
        target="megatron.core.extensions.transformer_engine:TELinear.forward",
        signature="(self, x)",
        replacement="megatron_fluid.patches.linears:te_linear_forward",
        **_WITH_TRANSFORMER_ENGINE,
        reason="the same for Transformer Engine's linears, which gather and reduce-scatter inside "
        "one autograd function",
    ),
    Patch(
        name="te-layer-norm-linear",
        target="megatron.core.extensions.transformer_engine:TELayerNormColumnParallelLinear.forward",
        signature="(self, x)",
        replacement="megatron_fluid.patches.linears:te_layer_norm_column_forward",
        **_WITH_TRANSFORMER_ENGINE,
        reason="the same where the norm is part of the linear",
    ),
    *SETTING_PATCHES,  # what older versions lack: versions.py
    *CPU_PATCHES,  # only with --fluid-cpu: cpu/replacements.py
)


def megatron_installed() -> bool:
    """Whether `import megatron.core` would find something. Does not import it."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def megatron_version() -> str:
    """The version of the megatron-core that is imported (from a wheel or from a checkout on the
    path).

    Megatron appends the commit of whatever git repository it lies in ("0.19.2+a1b2c3d"); that is
    left out.

    Raises:
        ImportError: there is none.
    """
    return str(importlib.import_module("megatron.core.package_info").__version__).partition("+")[0]


_ENGINE = Engine(
    PATCHES,
    version=megatron_version,
    supported=SUPPORTED_MEGATRON,
    allow_unsupported=functools.partial(switches.asked, "allow_unsupported"),
    strict=functools.partial(switches.asked, "strict"),
    disabled=switches.disabled,
    disabled_by=switches.disabled_by,
    switched_off=switches.switched_off,
    help_version="Try it anyway with --fluid-allow-unsupported-megatron (or "
    "MEGATRON_FLUID_ALLOW_UNSUPPORTED=1); MEGATRON_FLUID=off leaves Megatron untouched.",
    help_disable="--fluid-disable-patch {name} (or MEGATRON_FLUID_DISABLE_PATCH={name}) leaves it "
    "out; MEGATRON_FLUID=off leaves Megatron untouched.",
)


def arm() -> None:
    """Patch what is imported of Megatron, and the rest when it is imported. Called by `import
    megatron_fluid`. Idempotent.

    Raises:
        PatchError: with --fluid-strict, a patch does not fit the Megatron found; nothing stays
            patched.
    """
    if importlib.util.find_spec("wrapt") is None and not megatron_installed():
        return  # torch alone, without the package's other requirement: there is nothing to hook
    _ENGINE.arm()
    if switches.switched_off() is None:
        reach_children()


def reset_layers() -> None:
    """Let every layer be decided about again in its next forward: after adapters, quantisers or
    hooks were added to a model that has run. Call it on all ranks, between two steps."""
    for name in ("moe.layer", "attention.self_attention", "attention.latent"):
        if (module := sys.modules.get(f"{__name__}.{name}")) is not None:
            module.DECISIONS.forget()


def report_at_first_forward() -> None:
    """Have rank 0 print the start-up report, unless Megatron's set-up of a model has done so."""
    importlib.import_module(f"{__name__}.startup_report").report(own_loop=False)


# What users call; engine.py describes each.
apply_all = _ENGINE.apply
revert = _ENGINE.revert
patched = _ENGINE.patched
check_names = _ENGINE.check_names
disable = _ENGINE.disable
is_applied = _ENGINE.is_applied
off_reason = _ENGINE.off_reason
count_instance = _ENGINE.count
version_problem = _ENGINE.version_problem
report = _ENGINE.report
