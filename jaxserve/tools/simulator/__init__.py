"""Simulator: the engine's scheduler, router and page store in virtual time, with predicted step times."""
