"""Prompts of a body: texts or token ids, one or several."""

from typing import Any

from jaxserve.api.token_ids import TokenIds
from jaxserve.errors import brief
from jaxserve.openai.context import BodyContext
from jaxserve.openai.errors import BadRequestError, Json

Prompt = str | TokenIds
_PART_LEN = 2**16  # tokens checked per C call


def _split_prompts(prompt: Any, name: str) -> list[Prompt]:
    """Return the prompts in the value of the field `name`, which has one prompt or a list."""
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
    """Return the prompts in the body field `name`; texts are encoded if the body wants them without special tokens."""
    prompts = _split_prompts(given.get(name), name)
    if given.get("add_special_tokens", True) or not (texts := [p for p in prompts if isinstance(p, str)]):
        return prompts
    tokenizer, check_text = context.needed_tokenizer(name), context.text_check(given)
    for text in texts:
        check_text(text)
    return [tokenizer.encode(p, add_special_tokens=False) if isinstance(p, str) else p for p in prompts]


def _are_token_ids(items: list[Any]) -> bool:
    """Return whether a list has only 32-bit integers, and at least one."""
    # Faster than looking at each; other threads run between the parts.
    parts = (items[start : start + _PART_LEN] for start in range(0, len(items), _PART_LEN))
    return bool(items) and all(
        set(map(type, part)) == {int} and min(part) >= -(2**31) and max(part) < 2**31 for part in parts
    )
