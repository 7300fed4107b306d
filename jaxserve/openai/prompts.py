"""Prompts of a body: texts or token ids, one or several."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.api.token_ids import TokenIds
from jaxserve.errors import brief
from jaxserve.openai.errors import BadRequestError
from jaxserve.text.tokenizer import Tokenizer

Prompt = str | TokenIds
_PART_LEN = 2**16


def completion_prompts(prompt: Any, name: str = "prompt") -> list[Prompt]:
    """Return the prompts in a field."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and _are_token_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(isinstance(item, list) and _are_token_ids(item) for item in prompt):
            return prompt
    message = f"{name} must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    raise BadRequestError(f"{message}, got {brief(prompt)}", name)


def plain_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer | None, check_text: Callable[[str], None], name: str = "prompt"
) -> list[Prompt]:
    """Return prompts whose texts are encoded without the model's special tokens around them.

    Args:
        prompts: prompts of a body.
        tokenizer: tokenizer of the model.
        check_text: function that raises RequestError for a text that is too long to be encoded.
        name: field of the prompts.
    """
    if not any(isinstance(prompt, str) for prompt in prompts):
        return list(prompts)
    if tokenizer is None:
        raise BadRequestError(f"{name} needs a tokenizer, and the engine runs with skip_tokenizer_init", name)
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text(prompt)
    return [tokenizer.encode(p, add_special_tokens=False) if isinstance(p, str) else p for p in prompts]


def _are_token_ids(items: list[Any]) -> bool:
    # Faster than looking at each, in parts between which other threads run.
    parts = (items[start : start + _PART_LEN] for start in range(0, len(items), _PART_LEN))
    return bool(items) and all(
        set(map(type, part)) == {int} and min(part) >= -(2**31) and max(part) < 2**31 for part in parts
    )
