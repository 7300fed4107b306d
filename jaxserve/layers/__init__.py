"""Layers shared by the decoder blocks of all models."""
