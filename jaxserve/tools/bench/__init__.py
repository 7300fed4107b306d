"""Measure an engine under a workload: offline throughput, and latency under an open-loop load."""
