"""Server checks with third-party clients, each run by its own environment's interpreter."""
