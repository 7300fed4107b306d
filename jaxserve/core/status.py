"""Status of a core, as whoever cannot look into it sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jaxserve.errors import RequestError

if TYPE_CHECKING:
    from jaxserve.api.metrics import Occupancy
    from jaxserve.scheduling.step_time import Rates

SLEEP_TAGS = ("weights", "kv_cache")  # parts of the memory that can be woken separately, by vLLM's names


class MemoryState(NamedTuple):
    """Memory that an engine has on its devices.

    Attributes:
        is_closed: True once the engine was closed.
        asleep: parts that are freed until they are woken, of SLEEP_TAGS.
        has_weights: False if the weights were dropped, or others could not be read.
    """

    is_closed: bool = False
    asleep: frozenset[str] = frozenset()
    has_weights: bool = True

    def check_open(self) -> None:
        """Raise RuntimeError if the engine is closed."""
        if self.is_closed:
            raise RuntimeError("this engine is closed: its weights and pools are freed; start another one")

    def check_serve(self) -> None:
        """Raise RequestError if no request can be served now, RuntimeError if the engine is closed."""
        self.check_open()
        if self.asleep:
            raise RequestError("the engine must be awake to serve requests; call wake_up first")
        if not self.has_weights:
            raise RequestError(
                "the engine has no weights: the last could not be read, or sleep(level=2) let them go; update_weights"
            )

    @property
    def is_sleeping(self) -> bool:
        """True while some memory that `sleep` has freed is not allocated again."""
        self.check_open()
        return bool(self.asleep)

    @property
    def sleep_state(self) -> str:
        """State of the memory by vLLM's names: awake, weights_offloaded or discard_all."""
        if not self.asleep:
            return "awake"
        return "weights_offloaded" if self.has_weights else "discard_all"


class CoreStatus(NamedTuple):
    """Status of a core between two of its steps.

    Attributes:
        num_taken: events that it has taken since its start.
        has_work: True if a step has anything to do.
        occupancy: requests and pages.
        num_waiting_tokens: tokens to compute of requests that wait.
        rates: times of steps; None before they were measured.
        memory: memory of its devices.
        is_warm: True once every program is compiled.
    """

    num_taken: int
    has_work: bool
    occupancy: Occupancy
    num_waiting_tokens: int
    rates: Rates | None
    memory: MemoryState
    is_warm: bool
