"""AllGather-GEMM and GEMM-ReduceScatter of tensor parallelism."""
