"""Parts of gpu_report.py, a module for each process: it runs them one after the other and gathers their points."""
