"""Programs around an engine: planner, benchmark, quantizer, invariance check. Nothing depends on them but the CLI."""
