"""Structured output: what outputs must follow, and the tokens that it allows at each position."""
