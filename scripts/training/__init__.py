"""Corpus, tokenizer and model of the embedded checkpoint, for its training and scoring."""
