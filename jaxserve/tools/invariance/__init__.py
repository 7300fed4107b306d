"""Check of determinism: whether the tokens of a request depend on how it is run, on the device at hand."""
