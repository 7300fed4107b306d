"""Stand-ins for measurements: an engine on a device that takes no time, a random checkpoint and random prompts."""
