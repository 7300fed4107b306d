"""Assembly: an engine from a checkpoint and its configuration; the one package that sees all others."""
