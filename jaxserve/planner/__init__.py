"""Whether a model fits on chips that are not there, and how fast they can be at best."""
