"""Engine core and its callers: requests in, steps, outputs; on the host, without jax."""
