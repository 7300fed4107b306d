"""Assembly: builds an engine from a checkpoint and its configuration."""
