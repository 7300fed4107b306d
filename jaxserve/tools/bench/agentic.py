"""Agentic workload: sessions with many turns and tool calls between them, over a few shared system prompts.

Sizes follow vLLM's traffic study from 2026 (vllm-project/vllm#57103): a median session has 43 turns, 142,000 prompt
tokens and 444 output tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_TURNS, _TURN_SPREAD = 43.0, 0.6  # median, and the logarithm's standard deviation
_RESULT_SPREAD = 1.0  # distribution: tokens that a turn adds
_PAUSE_S, _PAUSE_SPREAD = 3.0, 1.3  # distribution: pauses of tool calls
_LEAST_TURNS = 2


@dataclass(frozen=True, slots=True)
class AgenticSizes:
    """Session sizes.

    Attributes:
        num_sessions: number of sessions.
        num_systems: different system prompts.
        system_len: tokens in a system prompt.
        turn_len: mean number of new tokens before each reply: a task, later tool results.
        output_len: tokens in a reply.
        max_len: maximum tokens in prompt and output, at which a session ends.
        session_gap_s: mean time between two session starts.
    """

    num_sessions: int
    num_systems: int
    system_len: int
    turn_len: int
    output_len: int
    max_len: int
    session_gap_s: float


SMALL = AgenticSizes(16, 4, 128, 14, 4, 1000, 10.0)  # fits the embedded model
FULL = AgenticSizes(32, 4, 16_384, 2_000, 10, 131_072, 15.0)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn in a session.

    Attributes:
        session: the session's index.
        system: its system prompt's index.
        prompt_len: prompt tokens, with the system prompt and all earlier turns.
        start_s: the session's start.
        pause_s: time between the previous turn's end and this turn; 0 for the first.
    """

    session: int
    system: int
    prompt_len: int
    start_s: float
    pause_s: float


def turns(sizes: AgenticSizes, rng: np.random.Generator) -> Iterator[Turn]:
    """Yield all sessions' turns, one session after another."""
    start_s = 0.0
    for session in range(sizes.num_sessions):
        num_turns = max(_LEAST_TURNS, round(_log_normal(rng, _TURNS, _TURN_SPREAD)))
        system, length = int(rng.integers(sizes.num_systems)), sizes.system_len
        median = sizes.turn_len / np.exp(_RESULT_SPREAD**2 / 2)
        for turn in range(num_turns):
            length += max(1, round(_log_normal(rng, median, _RESULT_SPREAD)))
            pause_s = round(_log_normal(rng, _PAUSE_S, _PAUSE_SPREAD), 3) if turn else 0.0
            if length + sizes.output_len > sizes.max_len:
                break
            yield Turn(session, system, length, round(start_s, 3), pause_s)
            length += sizes.output_len
        start_s += float(rng.exponential(sizes.session_gap_s))


def _log_normal(rng: np.random.Generator, median: float, spread: float) -> float:
    """Draw a number with this median; `spread` is its logarithm's standard deviation."""
    return float(median * np.exp(spread * rng.standard_normal()))
