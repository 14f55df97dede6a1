#!/usr/bin/env bash
# Mixtral 8x7B (mistralai/Mixtral-8x7B-v0.1): 46.7B parameters, 12.9B active.
# On 8 H200, or on 2 nodes or more of 8 H100 or H200. How to run it: launch.sh

VOCAB_SIZE=32000
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 4096 --max-position-embeddings 32768
    --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
MOE=(
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 14336
    --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-token-dispatcher-type alltoall
)
# Experts stay inside a node; more nodes add pipeline stages first, then replicas.
PARALLEL=(
    --tensor-model-parallel-size 1 --expert-model-parallel-size 8
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
PRECISION=(--bf16)
if [ "${NNODES:-1}" = 1 ]; then
    # The moments of Adam in bf16: 46.7B parameters on one node.
    PRECISION+=(--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16)
else
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
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --moe-ffn-hidden-size 96
    --num-attention-heads 4 --num-query-groups 2 --kv-channels 16
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
