"""Assembly: builds an engine from a checkpoint and its configuration; the only package that imports all others."""
