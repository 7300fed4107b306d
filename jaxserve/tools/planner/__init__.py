"""Planner: predict whether a model fits on given chips, and how fast it can run, without having them."""
