"""Lines of a batch file: JSON, names that occur once, and seeds."""

import hashlib
import json

from jaxserve.errors import brief
from jaxserve.openai.batch_output import MAX_LINE_BYTES
from jaxserve.openai.errors import BadRequestError, Json

DUPLICATE = "duplicate_custom_id"
"""Error code of a line whose custom_id an earlier line has."""


def parse_line(raw: bytes) -> Json:
    """Return an input line's JSON object; BadRequestError if it is not one, or the line exceeds MAX_LINE_BYTES."""
    if len(raw) > MAX_LINE_BYTES:
        message = f"a line must be at most {MAX_LINE_BYTES} bytes, got more; spread its prompts over several lines"
        raise BadRequestError(message, code="line_too_long")
    try:
        content = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"a line must hold one JSON object, but: {error}", code="invalid_json_line") from None
    if not isinstance(content, dict):
        raise BadRequestError(f"a line must hold one JSON object, got {brief(content)}", code="invalid_json_line")
    return content


def _refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and infinities, which Python's JSON reader would accept."""
    raise ValueError(f"{name} is not JSON")


def claim_id(custom_id: object, seen: set[int]) -> None:
    """Add a custom_id's hash to `seen`; BadRequestError if it is not a non-empty string, or an earlier line has it."""
    if not isinstance(custom_id, str) or not custom_id:
        raise BadRequestError(f"custom_id must be a non-empty string, got {brief(custom_id)}", "custom_id")
    if hash(custom_id) in seen:
        raise BadRequestError(
            f"custom_id must be unique in the file, got {brief(custom_id)} again; this record has none, so that the id "
            "finds the record of the first line that has it",
            "custom_id",
            DUPLICATE,
        )
    seen.add(hash(custom_id))


def derived_seed(key: bytes, number: int, index: int) -> int:
    """Return the 63-bit sampling seed for a prompt of line `number`, derived from the run seed in `key`."""
    digest = hashlib.blake2b(f"{number}/{index}".encode(), digest_size=8, key=key, person=b"batch seed").digest()
    return int.from_bytes(digest, "little") >> 1
