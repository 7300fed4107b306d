"""Prompts of a body: texts or token ids, one or several."""

from typing import Any

from jaxserve.api.token_ids import TokenIds
from jaxserve.errors import brief
from jaxserve.openai.context import BodyContext
from jaxserve.openai.errors import BadRequestError, Json

Prompt = str | TokenIds
_PART_LEN = 2**16


def completion_prompts(prompt: Any, name: str) -> list[Prompt]:
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


def read_prompts(given: Json, name: str, context: BodyContext) -> list[Prompt]:
    """Return the prompts in a field, encoded if the body wants no special tokens around them."""
    prompts = completion_prompts(given.get(name), name)
    if given.get("add_special_tokens", True) or not any(isinstance(prompt, str) for prompt in prompts):
        return prompts
    tokenizer, check_text = context.needed_tokenizer(name), context.text_check(given)
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text(prompt)
    return [tokenizer.encode(p, add_special_tokens=False) if isinstance(p, str) else p for p in prompts]


def _are_token_ids(items: list[Any]) -> bool:
    # Faster than looking at each; other threads run between the parts.
    parts = (items[start : start + _PART_LEN] for start in range(0, len(items), _PART_LEN))
    return bool(items) and all(
        set(map(type, part)) == {int} and min(part) >= -(2**31) and max(part) < 2**31 for part in parts
    )
