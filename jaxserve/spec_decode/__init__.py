"""Proposers of tokens for speculative decoding; `jaxserve.execution.verification` checks what they propose."""
