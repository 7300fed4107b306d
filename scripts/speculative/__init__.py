"""Runs, plots and page of `speculative_report.py`."""
