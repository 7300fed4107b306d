"""KV pages on the host: allocation, prefix cache, eviction and tiers."""
