"""Stages of gpu_report.py and tpu_report.py; the driver runs each in a process of its own and gathers its points."""
