"""StepChoice: limits of the next plan, as the chooser decides them, the scheduler takes them and the log has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Timing(NamedTuple):
    """Times that a plan depends on.

    Attributes:
        starts_s: time at which the device will begin with it.
        prefill_step_s: time of a step with prompt tokens, before it computes any.
        prefill_token_s: time of a prompt token.
        decode_token_s: time of a row in decode.
    """

    starts_s: float
    prefill_step_s: float
    prefill_token_s: float
    decode_token_s: float


class StepChoice(NamedTuple):
    """Limits of the next plan. Which tokens come of it does not depend on them.

    Attributes:
        max_steps: maximum steps, or rounds with drafts.
        num_drafts: tokens to draft by slot, if all rows are in decode; empty for a plan without drafts. If they do not
            fit, the plan has one step.
        timing: times by which rows in decode get their tokens in time; None without targets, or before steps were
            measured.
        may_split: True if a plan of one step without drafts may be split for rows that wait for tokens.
    """

    max_steps: int = 1
    num_drafts: Sequence[int] = ()
    timing: Timing | None = None
    may_split: bool = False


ONE_STEP = StepChoice()
