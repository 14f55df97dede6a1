#!/usr/bin/env bash
# gpt-oss-20b (openai/gpt-oss-20b): 20.9B parameters, 3.6B active, trained here in bf16.
# On 8 H100 or H200, and on any number of such nodes. How to run it: launch.sh

VOCAB_SIZE=201088
# Layers alternate between sliding-window and full attention, the first has a window. Each softmax has a learned extra logit.
MODEL=(
    --num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880
    --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 64
    --softmax-type learnable --window-size 127,0 --window-attn-skip-freq 2
    --seq-length 4096 --max-position-embeddings 131072
    --position-embedding-type yarn --rotary-base 150000 --rotary-scaling-factor 32
    --yarn-original-max-position-embeddings 4096 --yarn-beta-fast 32 --yarn-beta-slow 1
    --no-yarn-correction-range-round-to-int
    --normalization RMSNorm --norm-epsilon 1e-5
    --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
# Biases (in attention, router and experts) are Megatron's default: no --disable-bias-linear.
MOE=(
    --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 2880
    --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
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
    --no-rope-fusion --no-bias-dropout-fusion
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
SMOKE=(
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --moe-ffn-hidden-size 64
    --num-attention-heads 4 --num-query-groups 2 --kv-channels 16 --num-experts 8
    --window-size 15,0
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
