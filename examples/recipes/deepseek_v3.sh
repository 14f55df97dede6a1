#!/usr/bin/env bash
# DeepSeek-V3 (deepseek-ai/DeepSeek-V3): 671B parameters, 37B active, trained here in bf16.
# Whole on 128 nodes (1024 GPUs) or a multiple; on one node its layers at full width, 3 of the 61, on 8 H200.
# How to run it: launch.sh

VOCAB_SIZE=129280
MODEL=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
    --num-attention-heads 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
    --seq-length 4096 --max-position-embeddings 163840
    --position-embedding-type rope --rotary-base 10000
    --rope-type yarn --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
    --normalization RMSNorm --norm-epsilon 1e-6
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
# Sigmoid router. A bias per expert balances it, beside a small auxiliary loss per sequence.
MOE=(
    --moe-layer-freq '([0]*3+[1]*58)'
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
    --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall
)
PARALLEL=(
    --tensor-model-parallel-size 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
PRECISION=(--bf16)
if [ "${NNODES:-1}" = 1 ]; then
    global_batch=256
    MODEL+=(--num-layers 3)
    MOE+=(--moe-layer-freq '([0]*1+[1]*2)')
    PARALLEL+=(--expert-model-parallel-size 8)
else
    global_batch=4096
    # 32 stages (16 ranks, 2 of each): the dense layers, 29 times two layers, the MTP layer, the loss.
    PARALLEL+=(
        --expert-model-parallel-size 64 --pipeline-model-parallel-size 16
        --pipeline-model-parallel-layout 'Et*3|(tt|)*29m|L'
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    )
fi
KERNELS=(
    --transformer-impl transformer_engine
    --moe-grouped-gemm --moe-permute-fusion
    --no-rope-fusion
    --cross-entropy-loss-fusion --cross-entropy-fusion-impl native
    --no-create-attention-mask-in-dataloader
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size $global_batch --train-iters 1000
    --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-iters 50
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.006
    --log-interval 1 --log-throughput --eval-interval 1000 --eval-iters 10
)
FLUID=(--fluid-moe-backend auto --fluid-fused-optimizer)
# With pipeline stages an iteration cannot be one graph.
if [ "${NNODES:-1}" = 1 ]; then
    FLUID+=(--fluid-graph)
fi
SMOKE=(
    --num-layers 3 --moe-layer-freq '([0]*1+[1]*2)' --hidden-size 64 --ffn-hidden-size 96
    --num-attention-heads 4 --q-lora-rank 32 --kv-lora-rank 16
    --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
    --num-experts 16 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
