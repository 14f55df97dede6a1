"""AllGather-GEMM under every installed strategy: ``benchmarks/launch.sh test_ag_kernel M N K
[flags]``."""

import sys

from benchmarks.suites.tp_overlap import main

if __name__ == "__main__":
    sys.exit(main("ag"))
