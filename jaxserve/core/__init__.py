"""Engine core and its callers: requests in, steps, outputs; one thread, on the host, without jax."""
