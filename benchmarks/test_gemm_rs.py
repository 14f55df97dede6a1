"""GEMM-ReduceScatter under every installed strategy: ``benchmarks/launch.sh test_gemm_rs M N K
[flags]``."""

import sys

from benchmarks.suites.tp_overlap import main

if __name__ == "__main__":
    sys.exit(main("rs"))
