"""Engines compared by bench_baselines.py, each in a separate process and possibly another interpreter."""
