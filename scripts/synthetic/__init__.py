"""Stand-ins of measurements: an engine over a device that takes no time, a checkpoint and prompts of random numbers."""
