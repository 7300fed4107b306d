"""The engines that bench_baselines.py compares: each runs in a process, and if need be an interpreter, of its own."""
