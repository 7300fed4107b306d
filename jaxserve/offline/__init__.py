"""LLM and its methods: generation, chat, beam search, scores and embeddings from Python."""
