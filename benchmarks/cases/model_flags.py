"""What the models of the suite pretrain ask of Megatron beside their widths: their attention and
their router, as examples/recipes/ have them. Balancing stays the suite's (ROUTINGS)."""

from __future__ import annotations

__all__ = ["MODEL_FLAGS"]

_ROUTER = ["--moe-router-dtype", "fp32"]
_QWEN3 = ["--kv-channels", "128", "--qk-layernorm", *_ROUTER]

MODEL_FLAGS = {
    "qwen3-30b-a3b": _QWEN3,
    "qwen3-235b-a22b": _QWEN3,
    "olmoe": ["--qk-layernorm", "--moe-router-pre-softmax", *_ROUTER],
    "mixtral-8x7b": _ROUTER,
    "deepseek-v3": [
        *("--moe-router-score-function", "sigmoid"),
        *("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "1e-3"),
        *("--moe-router-num-groups", "8", "--moe-router-group-topk", "4"),
        *("--moe-router-topk-scaling-factor", "2.5", *_ROUTER),
    ],
    "tiny": [],
}
