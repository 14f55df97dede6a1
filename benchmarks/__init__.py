"""Benchmarks: one module a suite, results as data under ``benchmarks/results``."""
