"""Layers that all models share."""
