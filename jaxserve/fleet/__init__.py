"""Several engines with one queue."""
