"""Structured output: grammars that outputs must follow, and the tokens that they allow at each position."""
