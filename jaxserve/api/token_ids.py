"""Type of token ids."""

TokenIds = list[int]
