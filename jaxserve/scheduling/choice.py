"""StepChoice: limits of the next plan, as chosen by the step chooser, applied by the scheduler and logged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Timing(NamedTuple):
    """Predicted times that a plan depends on.

    Attributes:
        starts_s: time at which the device will start the step.
        prefill_step_s: fixed time of a step with prompt tokens.
        prefill_token_s: time per prompt token.
        decode_token_s: time per decoding row.
    """

    starts_s: float
    prefill_step_s: float
    prefill_token_s: float
    decode_token_s: float


class StepChoice(NamedTuple):
    """Limits for the next plan. The sampled tokens do not depend on them.

    Attributes:
        max_steps: maximum decode steps in one dispatch; with drafts, maximum rounds.
        num_drafts: number of tokens to draft by slot, if all rows are decoding; empty for a plan without drafts. If the
            drafts do not fit, the plan has one step.
        timing: times that decide how many prompt tokens fit before the next deadline; None without latency targets, or
            before any step was measured.
        may_split: True if a one-step plan without drafts may be split into two programs, so that rows waiting for the
            host (for a grammar's mask) do not delay the others.
    """

    max_steps: int = 1
    num_drafts: Sequence[int] = ()
    timing: Timing | None = None
    may_split: bool = False


ONE_STEP = StepChoice()
