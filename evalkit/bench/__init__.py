"""Benchmarks of whole models, and captures of their attention inputs; the kernels' own are in prefill_kernels.bench."""
