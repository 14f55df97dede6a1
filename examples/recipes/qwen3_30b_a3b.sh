#!/usr/bin/env bash
# Qwen3-30B-A3B (Qwen/Qwen3-30B-A3B): 30.5B parameters, 3.3B active.
# On 8 H200, or on 2 nodes or more of 8 H100 or H200. How to run it: launch.sh

VOCAB_SIZE=151936
MODEL=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
    --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128
    --qk-layernorm
    --seq-length 4096 --max-position-embeddings 40960
    --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-6
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
# Softmax over the chosen experts is the model's softmax over all, divided by the sum of the chosen.
MOE=(
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
    --moe-router-dtype fp32
    --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3
    --moe-token-dispatcher-type alltoall
)
# Experts stay inside a node; more nodes add pipeline stages first, then replicas.
PARALLEL=(
    --tensor-model-parallel-size 1 --expert-model-parallel-size 8
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
PRECISION=(--bf16)
if [ "${NNODES:-1}" != 1 ]; then
    PARALLEL+=(--pipeline-model-parallel-size 2)
fi
KERNELS=(
    --transformer-impl transformer_engine
    --moe-grouped-gemm --moe-permute-fusion
    --cross-entropy-loss-fusion --cross-entropy-fusion-impl native
    --no-create-attention-mask-in-dataloader
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 256 --train-iters 1000
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 50
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.02
    --log-interval 1 --log-throughput --eval-interval 1000 --eval-iters 10
)
FLUID=(--fluid-moe-backend auto --fluid-fused-optimizer)
# With pipeline stages an iteration cannot be one graph.
if [ "${NNODES:-1}" = 1 ]; then
    FLUID+=(--fluid-graph)
fi
SMOKE=(
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --moe-ffn-hidden-size 32
    --num-attention-heads 4 --num-query-groups 2 --kv-channels 32 --num-experts 16
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
