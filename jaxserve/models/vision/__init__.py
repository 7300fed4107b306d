"""Vision towers: from image patches to the embeddings that a decoder reads. `tower.py` is the entry."""
