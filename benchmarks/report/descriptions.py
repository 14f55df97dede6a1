"""What the suites' result files hold, in words: for the tables that are made of them
(benchmarks/report/tables.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["FLOORS", "SUITES", "Suite"]

FLOORS = ("floor", "gemm_only", "floor_sdpa", "floor_te")
"""Variants that do the computation alone."""


@dataclass(frozen=True)
class Suite:
    """How a suite's file is read.

    Attributes:
        what: what one row measures. floor: what its floor is, if it has one.
        others: variants of others -> what they are.
        ours: more variants of megatron_fluid -> what they are; with these nothing is compared.
        rivals: others that no variant measures yet; tables say that they were not run.
        best: heading of the column that shows the fastest of `others`.
        also: the one of `ours` that has a column of its own, compared like fluid, and its heading.
        unoverlapped: the variant that does the same work without overlap, for a column of its own.
        told: names in the rows' config whose values the table's words tell -> what older files
            mean, which do not have them.
        beside: mode -> another mode whose variants do the same work, and are among its `others`.
        shown: number of GPUs -> "case mode" pattern of what the README shows.
    """

    what: str
    others: Mapping[str, str]
    floor: str = ""
    ours: Mapping[str, str] = field(default_factory=dict)
    rivals: Mapping[str, str] = field(default_factory=dict)
    best: str = "best other"
    also: tuple[str, str] | None = None
    unoverlapped: str = "fluid_no_overlap"
    told: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    shown: Callable[[int], str] = lambda gpus: ".*"


def _compared_linears(gpus: int) -> str:
    """Gate and up, and down of Llama-3-70B, and linears of 12288 x 49152 weights, by what one rank
    multiplies of them."""
    share, part = 28672 // gpus, 12288 // gpus
    return (
        rf"(ag-8192-{share}-8192|rs-8192-8192-{share}|ag-\d+-{part}-49152|rs-\d+-49152-{part}) .*"
    )


_NO_OVERLAP = "megatron_fluid, one kernel after the other"
_PLAIN = "megatron_fluid over plain all-to-alls"
_MEGATRON = "Megatron with megatron_fluid by patch"
_A2A = "Megatron with Transformer Engine, a2a"

SUITES = {
    "pretrain": Suite(
        what="whole training iterations through Megatron's own loop on mock data: forward, "
        "backward and optimizer of 16 sequences a GPU, one a microbatch, two, four or eight in "
        "cases named -mbs2, -mbs4 and -mbs8. A model's own widths, "
        "attention and router, fewer layers, and on one GPU 64 of DeepSeek-V3's 256 experts; a "
        "vocabulary of 32,000, no multi-token prediction and the same auxiliary loss for all",
        told={"microbatches": "4", "routing": "forced"},
        others={
            "megatron": "without options",
            "megatron_best": "the fastest of the flags tried",
            "megatron_graph": "with partial CUDA graphs",
            "megatron_graph_unchecked": "with partial CUDA graphs, without the checks for NaN and "
            "without overlapped reductions and gathers",
            "megatron_graph_apex": "with partial CUDA graphs and Apex's fused weight gradients, "
            "without the checks for NaN and without overlapped reductions and gathers",
            "megatron_best_fp8": "fp8 blockwise, the fastest of its flags that a search found",
        },
        ours={
            "fluid_graph": "megatron_fluid with partial CUDA graphs",
            "fluid_whole_graph": "megatron_fluid, forward and backward of an iteration as one CUDA "
            "graph, without the checks for NaN and without overlapped reductions and gathers",
            "fluid_fp8": "megatron_fluid, fp8 blockwise",
            "fluid_graph_fp8": "megatron_fluid, fp8 blockwise, with partial CUDA graphs",
            "fluid_whole_graph_fp8": "megatron_fluid as one CUDA graph, fp8 blockwise",
        },
        best="best of Megatron's own",
        also=("fluid_whole_graph", "megatron_fluid as one CUDA graph"),
    ),
    "recipes": Suite(
        what="training iterations of the recipes by Megatron-LM's unchanged pretrain_gpt.py on "
        "mock data, with fewer layers (`fewer`) and one sequence a microbatch, where olmoe_1b_7b "
        "has two. Those with cuBLAS 13.1 ran before the recipes had --moe-permute-fusion, which "
        "may make Megatron faster. Its best flags were searched in `pretrain` with the same "
        "cuBLAS, not again for the recipe; mixtral_8x7b's were set by hand. They give gpt_oss_20b "
        "other losses (docs/recipes.md)",
        told={"microbatches": "16"},
        others={
            "megatron": "the recipe's flags",
            "megatron_best": "the recipe's flags and the fastest others that a search found",
        },
        best="best of Megatron's own",
    ),
    "losses": Suite(
        what="training runs of a small model on real text, an iteration's time; beside it the loss "
        "of every iteration of several seeds (`losses`), the mean of the last tenth (`final`) and "
        "on held-out text (`held_out`)",
        others={
            "megatron": "Transformer Engine, bf16",
            "megatron_fp8": "Transformer Engine, fp8 blockwise",
        },
        ours={"fluid_fp8": "megatron_fluid, fp8 blockwise"},
        best="best of Megatron's own",
    ),
    "cold_start": Suite(
        what="from the construction of a MoELayer in a new process to the end of its first forward "
        "and backward: `cold` with empty caches of compiled kernels, `warm` with filled ones",
        others={},
    ),
    "moe_layer": Suite(
        what="one mixture-of-experts layer with its router; in cases named `-zipf` popular experts "
        "get more. Where both ratios are shown, the second is a layer on plain torch beside "
        "Megatron's, so it includes what Megatron's module does around the layer. In fp8 Megatron "
        "was run with the alltoall dispatcher alone, in both Qwen3 models 2 to 3.4 times as long "
        "as its fastest layer in bf16. Tables that name no cuBLAS had torch's, 13.1",
        told={"tokens": "4096"},
        floor="the experts' GEMMs alone, by torch, on as many rows spread evenly",
        others={
            "megatron_te_alltoall": "alltoall dispatcher",
            "megatron_te_allgather": "allgather dispatcher",
            "megatron_te_overlap_wgrad": "alltoall dispatcher with weight gradients overlapped",
            "megatron_te_single_launch": "alltoall dispatcher, the variable for a grouped GEMM in "
            "one launch, which does nothing with cuBLAS 13.1",
            "megatron_te_grouped_weight": "alltoall dispatcher, one parameter for all experts",
            "megatron_te_allgather_grouped_weight": "allgather dispatcher, one parameter for all "
            "experts",
            "megatron_te_cutlass": "alltoall dispatcher, Transformer Engine's CUTLASS grouped GEMM",
            "megatron_te_allgather_cutlass": "allgather dispatcher, CUTLASS grouped GEMM",
            "megatron_te_fp8": "alltoall dispatcher, fp8 blockwise",
            "megatron_te_deepep": "flex dispatcher with DeepEP",
            "megatron_te_deepep_grouped_weight": "flex dispatcher with DeepEP, one parameter for "
            "all experts",
            "megatron_te_nccl_ep": "flex dispatcher with NCCL EP",
            "torch_grouped": "torch's grouped GEMM between torch's operations",
            "liger_triton": "Liger's fused MoE in Triton",
            "sonic": "SonicMoE",
            "liger_cute": "LigerCute, whose backward computes gate and up again",
        },
        ours={
            "fluid_no_overlap": _NO_OVERLAP,
            "fluid_rounds": "megatron_fluid over round-robin P2P exchanges, dX in chunks",
            "all_to_all": "megatron_fluid's plain all-to-all layer, nothing overlapped",
            "fluid_graph": "megatron_fluid, replayed from a CUDA graph",
            "fluid_megatron": _MEGATRON,
            "fluid_megatron_te": f"{_MEGATRON}, with Transformer Engine's experts",
            "fluid_megatron_te_cutlass": f"{_MEGATRON}, with Transformer Engine's experts and its "
            "CUTLASS grouped GEMM",
            "fluid_megatron_te_fp8": f"{_MEGATRON}, with Transformer Engine's experts in fp8 "
            "blockwise",
            "fluid_experts_alltoall": "megatron_fluid's experts, Megatron's alltoall dispatcher",
            "fluid_experts_allgather": "megatron_fluid's experts, Megatron's allgather dispatcher",
            "fluid_fp8": "megatron_fluid, experts in fp8 blockwise",
            "fluid_batch_invariant": "megatron_fluid, the same bits in any batch",
            "fluid_megatron_fp8": f"{_MEGATRON}, fp8 blockwise",
        },
        best="best of the others",
        shown=lambda gpus: ".* (forward|train)",
    ),
    "memory": Suite(
        what="one mixture-of-experts layer on one GPU, 4096 tokens (sonicmoe 16384): the time of a "
        "step, and beside it the bytes kept for the backward (`kept_bytes`) and the most held "
        "above input and weights (`peak_bytes` in the file: of one layer the same with every "
        "recomputation). Variants run one after the other with four samples each, and Megatron's "
        "grouped GEMM is its default, not its fastest: times are compared in `moe_layer`",
        others={
            "megatron_te": "Transformer Engine",
            "megatron_te_moe_act": "with `--recompute-modules moe_act`",
            "megatron_te_moe": "with `--recompute-modules moe`",
        },
        ours={
            "fluid_rows": "megatron_fluid, `--fluid-moe-recompute rows`",
            "fluid_hidden": "megatron_fluid, `hidden`",
            "fluid_both": "megatron_fluid, `both`",
        },
        shown=lambda gpus: "",  # times of a layer are compared in moe_layer
    ),
    "slow_wire": Suite(
        what="hosts joined by a link of limited rate, played by one machine on CPU cores: case "
        "`moe-2x1-wire-0.5` is an MoE layer over 2 hosts of 1 rank, with a wire that takes half as "
        "long as the computation; wire-0 has no limit. fp32, 512 wide, 1,024 tokens a rank. What "
        "is hidden includes what fewer bytes and both directions at once save "
        "(docs/several_nodes.md)",
        others={
            "plain": "plain all-to-all",
            "megatron_alltoall": "Megatron's own, alltoall dispatcher",
            "megatron_allgather": "Megatron's own, allgather dispatcher",
        },
        ours={"fluid_no_overlap": "megatron_fluid, each exchange waited for"},
        shown=lambda gpus: ".*-wire-1 .*",
    ),
    "block": Suite(
        what="two whole transformer layers, context and expert parallel over all GPUs; `seed` "
        "has the sizes of transformer_speedup on four. Megatron's routing is forced to balance; on "
        "plain torch random weights route about evenly. The second ratio is plain torch beside "
        "Megatron's modules, and includes what these do around the layers. Megatron's "
        "MoE layer has the alltoall dispatcher, not its fastest for small experts: with one "
        "parameter for all experts one of Qwen3-30B-A3B took 14 to 15% less by allgather in "
        "moe_layer",
        floor="their projections, attention kernels and experts' GEMMs alone",
        others={
            "megatron_te_a2a": _A2A,
            "megatron_te_grouped_weight": f"{_A2A}, and one parameter for all experts",
        },
        rivals={"megatron_te_p2p": "Megatron's exchanges p2p and all_gather"},
        ours={
            "fluid_no_overlap": _PLAIN,
            "fluid_graph": "megatron_fluid, replayed from a CUDA graph",
            "fluid_megatron": _MEGATRON,
        },
        best="best of Megatron's own",
    ),
    "transformer_speedup": Suite(
        what="two transformer layers on plain torch, context and expert parallel over all "
        "GPUs: over symmetric memory, in rounds, and over plain all-to-alls of NCCL. How much "
        "of the gain is overlap and how much the cheaper exchange is not told apart. Rounds have "
        "no chunks of dX here. Both ratios are to the plain all-to-alls. "
        "`inference` keeps nothing for a backward, `seed` has the sizes that the command takes by "
        "default",
        others={"all_to_all": "plain all-to-all"},
        ours={"rounds": "megatron_fluid over round-robin P2P exchanges alone"},
        best="plain all-to-all",
        also=("rounds", "over round-robin P2P exchanges"),
    ),
    "attention": Suite(
        what="self-attention with its norm, the sequence split over all GPUs; bf16, one sequence, "
        "causal, without rotary embeddings, launched one by one",
        floor="norm, projections and the attention kernel alone",
        others={"megatron_te_a2a": _A2A},
        rivals={"megatron_te_p2p": "Megatron's exchanges p2p and all_gather"},
        ours={
            "fluid_no_overlap": _PLAIN,
            "fluid_megatron": _MEGATRON,
            "fluid_megatron_exchange": "Megatron with megatron_fluid's exchanges alone",
        },
        best="Megatron's own, a2a",
    ),
    "tp_layer": Suite(
        what="one dense layer of Megatron's, tensor and sequence parallel over all GPUs; "
        "megatron_fluid is `--fluid-tp-overlap auto`. bf16, without fused weight gradients, "
        "launched one by one: in a CUDA graph linears are NCCL and the GEMM. `--tp-comm-overlap` "
        "has its defaults, without multicast; another form of it may be faster, as its ring is in "
        "all scatters of tp_overlap",
        told={"tokens": ""},
        floor="its four linears alone, on data that is already there",
        others={"megatron": "no overlap", "megatron_te_tp_overlap": "`--tp-comm-overlap`"},
        ours={"fluid_on": "megatron_fluid, `--fluid-tp-overlap on`"},
        best="best of Megatron's own",
        unoverlapped="megatron",
    ),
    "tp_overlap": Suite(
        what="a linear under tensor parallelism: `ag-M-N-K` gathers its input, `rs-M-N-K` "
        "reduce-scatters its output, around a GEMM "
        "of M x N x K on each GPU. bf16, launched one by one behind a head start: in a CUDA graph "
        "megatron_fluid's are NCCL and the GEMM. `auto` has a table of these shapes, Transformer "
        "Engine its defaults, without multicast; its pipeline has no gather. The first table has "
        "10 of the 79 shapes, all large (docs/results.md says how the others came out). Flux was "
        "run on 38 before (docs/rivals.md)",
        floor="the GEMM alone",
        others={
            "torch": "NCCL, then the GEMM or before it",
            "torch_symm_mem": "torch's symmetric memory",
            "te_userbuffers_ring": "Transformer Engine, ring",
            "te_userbuffers_pipeline": "Transformer Engine, pipeline",
            "flux": "Flux",
        },
        ours={
            "fluid_collective": "megatron_fluid by NCCL and the GEMM",
            "fluid_copy_engine": "megatron_fluid by copy engine",
            "fluid_fused": "megatron_fluid by kernels for Hopper",
        },
        unoverlapped="torch",
        shown=_compared_linears,
    ),
    "dispatch_combine": Suite(
        told={"tokens": "4096", "settings": ""},
        what="tokens to their experts and back without any GEMM, the routing's tables made before. "
        "NCCL's is one all-to-all of a row for each choice of an expert: at top-8 on two GPUs four "
        "times the bytes of the others, without a permutation. In `_once` a row goes to and from "
        "each rank, which leaves the experts of a rank to the caller. megatron_fluid's kernels "
        "take all of a GPU's SMs. Settings are DeepEP's, the fastest of eight a direction with 24 "
        "or 48 SMs, then NCCL EP's, the fastest of six numbers of channels",
        others={"nccl": "NCCL's all-to-all", "deepep": "DeepEP", "nccl_ep": "NCCL EP"},
        ours={
            "copy_engine": "megatron_fluid by copy engine",
            "fluid_stream": "megatron_fluid, streamed",
        },
        beside={"dispatch": "nccl", "combine": "nccl"},
        shown=lambda gpus: ".* (dispatch|combine)(_once)?",
    ),
    "grouped_gemm": Suite(
        what="the experts' GEMMs of one GPU, with the rows that four GPUs of 4096 tokens send "
        "it; main_grad adds to fp32 gradients. The first table has two of the five models. For "
        "weight gradients Transformer Engine falls back from CUTLASS to cuBLAS. `fc1 swiglu` has "
        "torch's GEMM as its only rival",
        others={
            "torch": "torch's grouped GEMM",
            "cublas": "cuBLAS, expert by expert",
            "deepgemm": "DeepGEMM",
            "deepgemm_fp8": "DeepGEMM",
            "te": "Transformer Engine's grouped GEMMs by cuBLAS",
            "te_cutlass": "Transformer Engine's grouped GEMMs by CUTLASS",
            "te_one_launch": "Transformer Engine's grouped GEMMs by one launch of cuBLAS",
        },
        ours={
            "fluid_even": "megatron_fluid, rows spread evenly",
            "torch_even": "torch's grouped GEMM, rows spread evenly",
            "fluid_fp8": "megatron_fluid in fp8",
            "fluid_two_kernels": "megatron_fluid, swiglu in a kernel of its own",
            "fluid_unkept": "megatron_fluid, without fc1's own result",
        },
        rivals={"deepgemm_wgrad": "DeepGEMM's weight gradients"},
        shown=lambda gpus: "(qwen3-30b-a3b|mixtral-8x7b) .*",
    ),
    "all_to_all": Suite(
        what="decoding's all-to-all: a case is a model and the tokens a GPU brings. Rows go in "
        "fp8 (NCCL EP's in bf16; DeepEP's dispatch also casts them from bf16) and return in bf16, "
        "megatron_fluid's once for each rank and the others' once for each of a token's eight "
        "experts: on two GPUs four times the bytes, on more GPUs less. "
        "`dispatch` and `combine` are 20 calls captured in one CUDA graph, `_eager` as many in a "
        "row that are launched one by one, megatron_fluid's as two kernels from Python. "
        "megatron_fluid's combine has the weights from its dispatch, the others get them at the "
        "combine, as `fluid_weights_at_combine` does",
        others={
            "torch_ata": "NCCL's all-to-all of padded buffers",
            "nvshmem_ata": "NVSHMEM's all-to-all of padded buffers",
            "deepep": "DeepEP, low latency",
            "nccl_ep": "NCCL EP, low latency",
        },
        rivals={"pplx": "pplx-kernels"},
        ours={
            "fluid_weights_at_combine": "megatron_fluid, weights travel in combine",
            "fluid_packed": "megatron_fluid, rows of experts packed in bf16",
            "after_dispatch": "a GEMM after a whole dispatch",
            "between_halves": "a GEMM between the halves of a dispatch",
        },
        shown=lambda gpus: r"(r1|v2-?lite)-(1|32|128) (dispatch|combine)(_eager)?",
    ),
}
"""By name, in the order in which the README shows them."""
