"""KV pages as the host sees them."""
