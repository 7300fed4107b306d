"""What gpu_report.py measures, a module for each process: it runs them one after the other and gathers their points."""
