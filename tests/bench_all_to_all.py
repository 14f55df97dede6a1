"""The decode-time all-to-all at several numbers of ranks, one table: `python3 -m
tests.bench_all_to_all`.

A row for each transport and each rival, a column for each number of ranks (EP8, EP4, EP2). A cell
of `benchmarks/suites/all_to_all.py` is mean and standard deviation of the slowest rank, in
microseconds, or `x` where nothing was measured; why is said below the table.

    python3 -m tests.bench_all_to_all --tokens 1 128 --transports nvlink nccl
    mpirun -np 4 python3 -m tests.bench_all_to_all

The first starts the ranks itself, on the GPUs of this host or as gloo processes where there is
none. With NODE_RANK, WORLD_SIZE, WORLD_LOCAL_SIZE, MASTER_ADDR and MASTER_PORT, once on every
node, it starts that node's ranks. Under torchrun or mpirun each process is one rank. Both of these
make one column, and the node or the rank numbered 0 prints the table.
"""

import sys

from benchmarks.report.all_to_all_by_ranks import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
