#!/usr/bin/env bash
# benchmarks/launch.sh NAME [ARGS]: run a benchmark on all GPUs of this host, or with NNODES, NODE_RANK, MASTER_ADDR and
# MASTER_PORT set, on several. Without a GPU: NPROC gloo ranks (2 by default). Suites that start
# their ranks themselves, and programs that start none, are one process.
set -euo pipefail
cd "$(dirname "$0")/.."
programs() { grep -ls '^if __name__ == "__main__"' benchmarks/*.py benchmarks/{suites,harness,report,tune}/*.py; }
if [ $# -lt 1 ]; then
  sed -n 2,4p "$0"
  echo "names: $(programs | sed 's|.*/||; s|\.py$||' | sort | tr '\n' ' ')"
  exit 2
fi
name=${1%.py}
script=
for program in $(programs); do
  if [ "${program##*/}" = "$name.py" ]; then script=$program; fi
done
[ -n "$script" ] || { echo "launch.sh: there is no $name in benchmarks/" >&2; exit 2; }
module=${script%.py}
module=${module//\//.}
shift
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
# A program whose docstring starts it by itself is one process: on every rank it would write the same file again.
if grep -q "python -m $module\\b" "$script"; then exec "$python" -m "$module" "$@"; fi
nproc=${NPROC:-$("$python" -c 'import torch; print(torch.cuda.device_count() or 2)')}
rendezvous=(--standalone)
if [ "${NNODES:-1}" -gt 1 ]; then
  rendezvous=(--nnodes "$NNODES" --node_rank "${NODE_RANK:?}" --master_addr "${MASTER_ADDR:?}" --master_port "${MASTER_PORT:-29500}")
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# A rank that fails leaves its peers waiting: not for the five minutes that training allows.
export MEGATRON_FLUID_TIMEOUT_S=${MEGATRON_FLUID_TIMEOUT_S:-60}
# Takes effect where no GPU is found: without it Megatron's modules need one.
export MEGATRON_FLUID_CPU=${MEGATRON_FLUID_CPU:-1}
# NVLink multicast is not needed by anything here; Transformer Engine's userbuffers would ask for it.
export UB_SKIPMC=${UB_SKIPMC:-1}
exec "$python" -m torch.distributed.run "${rendezvous[@]}" --nproc_per_node "$nproc" -m "$module" "$@"
