"""Values that a user sets and reads: configurations, request parameters, outputs and statistics. No jax."""
