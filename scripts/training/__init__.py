"""Corpus, tokenizer and model for training and scoring the embedded checkpoint."""
