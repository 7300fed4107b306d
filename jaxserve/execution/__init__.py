"""Steps on the devices: programs, their uploads, state and caches."""
