"""Counts from jax's own monitoring events."""

import threading

import jax


class EventCounter:
    """Counter for one monitoring event in jax, separate for each thread. It lives forever: jax keeps its listeners.

    Args:
        event: event name recorded by jax, with or without a duration.
    """

    def __init__(self, event: str) -> None:
        self._event = event
        self._local = threading.local()
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_timed_event)

    def _on_event(self, event: str, **kwargs: str | int) -> None:
        """Count an event that jax has recorded, if it has this counter's name."""
        if event == self._event:
            self._local.count = self.count + 1

    def _on_timed_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Count an event that jax has recorded with a duration, if it has this counter's name."""
        self._on_event(event)

    @property
    def count(self) -> int:
        """Event count so far on the calling thread."""
        return getattr(self._local, "count", 0)
