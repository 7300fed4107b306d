"""Checks of the server by clients that other people wrote, each run by the interpreter of its own environment."""
