"""Flags of a small training with Megatron's own loop, and the losses that its log names."""

from __future__ import annotations

import re

__all__ = ["ARGUMENTS", "losses"]

ARGUMENTS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type rope --disable-bias-linear --swiglu "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-iters 4 --eval-iters 1 --eval-interval 100 --log-interval 1 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128 "
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
).split()


def losses(log: str) -> list[float]:
    """Every loss that the log names, in order: one an iteration, then validation and test."""
    found = re.findall(r"lm loss(?: value)?: ([0-9.E+-]+|nan|inf)", log)
    return [float(text) for text in found]
