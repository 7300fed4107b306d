"""Several engines behind one queue."""
