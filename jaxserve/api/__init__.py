"""Values that a user sets and reads: configurations, parameters of requests, outputs and statistics. No jax."""
