"""Draft proposers for speculative decoding; `jaxserve.execution.verification` verifies the drafts."""
