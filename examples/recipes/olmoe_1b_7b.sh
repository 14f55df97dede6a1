#!/usr/bin/env bash
# OLMoE-1B-7B (allenai/OLMoE-1B-7B-0924): 6.9B parameters, 1.3B active.
# On 8 H100 or H200, and on any number of such nodes. How to run it: launch.sh

VOCAB_SIZE=50304
# The published model normalises queries and keys over all heads at once; --qk-layernorm does so head by head.
MODEL=(
    --num-layers 16 --hidden-size 2048 --ffn-hidden-size 1024
    --num-attention-heads 16 --kv-channels 128
    --qk-layernorm
    --seq-length 4096 --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 10000
    --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
# The chosen probabilities are not divided by their sum: --moe-router-pre-softmax.
MOE=(
    --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1024
    --moe-router-pre-softmax --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
    --moe-token-dispatcher-type alltoall
)
# Experts stay inside a node; more nodes are replicas.
PARALLEL=(
    --tensor-model-parallel-size 1 --expert-model-parallel-size 8
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
PRECISION=(--bf16)
KERNELS=(
    --transformer-impl transformer_engine
    --moe-grouped-gemm --moe-permute-fusion
    --cross-entropy-loss-fusion --cross-entropy-fusion-impl native
    --no-create-attention-mask-in-dataloader
)
TRAINING=(
    --micro-batch-size 2 --global-batch-size 1024 --train-iters 1000
    --lr 4e-4 --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-iters 50
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.02
    --log-interval 1 --log-throughput --eval-interval 1000 --eval-iters 10
)
FLUID=(--fluid-moe-backend auto --fluid-graph --fluid-fused-optimizer)
SMOKE=(
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 32 --moe-ffn-hidden-size 32
    --num-attention-heads 4 --kv-channels 16 --num-experts 16
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
