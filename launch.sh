#!/usr/bin/env bash
# ./launch.sh NAME [ARGS]: benchmarks/launch.sh, which says more
exec "$(dirname "${BASH_SOURCE[0]}")/benchmarks/launch.sh" "$@"
