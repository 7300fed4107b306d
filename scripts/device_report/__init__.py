"""Stages of gpu_report.py and tpu_report.py; the driver runs each in a separate process and collects its points."""
