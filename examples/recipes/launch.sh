# Shared by the recipes, which set the arrays and then source this: prints, shrinks or starts a run.
#
#   bash examples/recipes/MODEL.sh [Megatron's flags]           trains with $MEGATRON_LM/pretrain_gpt.py, which is not changed
#   bash examples/recipes/MODEL.sh --print [Megatron's flags]   prints the flags, one a line, and starts nothing
#   bash examples/recipes/MODEL.sh --smoke [Megatron's flags]   trains a small model of the same structure on 2 CPU ranks
#
# Environment: MEGATRON_LM (a checkout of Megatron-LM, tag core_v0.19.x), NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT,
# GPUS_PER_NODE and PYTHON. The flags of the command line come last, so that they win.

set -euo pipefail
recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$(dirname "$recipes")")
python=${PYTHON:-python3}
mode=train
case "${1-}" in
    --print | --smoke) mode=${1#--}; shift ;;
esac

for name in NNODES NODE_RANK MASTER_PORT; do
    least=1
    [ $name = NODE_RANK ] && least=0
    [[ ${!name:-1} =~ ^(0|[1-9][0-9]*)$ && ${!name:-1} -ge $least ]] || {
        echo "$name: found '${!name}', allowed: a whole number, $least or more" >&2
        exit 2
    }
done

# Made-up tokens, unless the command line names data.
DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$VOCAB_SIZE")
case " $* " in
    *" --data-path"[\ =]* | *" --data-args-path"[\ =]* | *" --train-data-path"[\ =]* | *" --per-split-data-args-path"[\ =]*) DATA=() ;;
esac

if [ "$mode" = smoke ]; then
    export CUDA_VISIBLE_DEVICES= MEGATRON_FLUID_CPU=1 OMP_NUM_THREADS=1
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    # No checkpoint is kept, and biases are where MODEL has them. MODEL and MOE are those of the real run; SMOKE makes them small.
    exec "$python" -m megatron_fluid.cli run --nproc-per-node 2 "$root/examples/pretrain_gpt_moe.py" \
        "${MODEL[@]}" "${MOE[@]}" "${SMOKE[@]}" --no-defaults save disable-bias-linear \
        --expert-model-parallel-size 2 --seq-length 64 --micro-batch-size 2 --global-batch-size 8 \
        --train-iters 20 --lr 3e-3 --log-interval 1 --eval-iters 1 --eval-interval 1000 "$@"
fi

flags=(
    "${MODEL[@]}" "${MOE[@]}" "${PARALLEL[@]}" "${PRECISION[@]}" "${KERNELS[@]}" "${TRAINING[@]}"
    "${FLUID[@]}" ${DATA[@]+"${DATA[@]}"} "$@"
)
if [ "$mode" = print ]; then
    printf '%s\n' "${flags[@]}"
    exit
fi
[ -f "${MEGATRON_LM:-}/pretrain_gpt.py" ] || {
    echo "MEGATRON_LM: found '${MEGATRON_LM:-}', which is no checkout of Megatron-LM, allowed: the folder of one, made by" \
        "git clone --branch core_v0.19.0 https://github.com/NVIDIA/Megatron-LM" >&2
    exit 2
}
exec "$python" -m megatron_fluid.cli run \
    --nproc-per-node "${GPUS_PER_NODE:-8}" --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \
    -m megatron_fluid.run "$MEGATRON_LM/pretrain_gpt.py" "${flags[@]}"
