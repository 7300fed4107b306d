"""Conversations whose pages move between tiers."""

from typing import Any

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from tests.e2e.workloads import generate, tokens

SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def conversations(engine: DrivenEngine, num_chats: int, num_turns: int) -> tuple[list[Any], int, int]:
    """Return the tokens of all turns, and the prompt tokens computed and needed at least: each turn adds 5."""
    chats = [tokens(20, f"chat {number}") for number in range(num_chats)]
    answers, num_computed, num_new = [], 0, 0
    for turn in range(num_turns):
        for number, chat in enumerate(chats):
            chat.extend(tokens(5, (number, turn)))
            (output,) = generate(engine, [chat], SHORT)
            answers.append(output.outputs[0].token_ids)
            chat.extend(answers[-1])
            num_computed += len(output.prompt_token_ids) - output.num_cached_tokens
            num_new += 25 if turn == 0 else 7
    return answers, num_computed, num_new
