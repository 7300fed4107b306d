"""Runs, plots and page for `speculative_report.py`."""
