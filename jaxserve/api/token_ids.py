"""Type for token ids."""

TokenIds = list[int]
