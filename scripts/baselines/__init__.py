"""The engines that bench_peers.py compares: each runs in a process, and if need be an interpreter, of its own."""
