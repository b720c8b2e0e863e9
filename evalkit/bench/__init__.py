"""Benchmarks of methods and of whole models, and captures; those of the kernels alone are in prefill_kernels.bench."""
