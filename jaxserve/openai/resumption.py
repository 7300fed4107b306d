"""Resumption: streams that another engine continues after the first one has died, with the same tokens.

A router sends `HEADER` with a request. The server then takes the reply's name, its date and the seed from there, and
adds a comment to the stream after each part, which clients of server-sent events ignore: the tokens and characters in
that part. If the server dies, the router sends the same body to another server, with the field `FIELD`, which has all
that the client has got; the reply continues there. Sampling depends only on the seed and the position, so the next
token is the one that the first engine would have sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.api.stream_events import Increment
from jaxserve.errors import brief
from jaxserve.openai.errors import BadRequestError

Json = dict[str, Any]

HEADER = b"x-jaxserve-resumable"
FIELD = "resume"
COMMENT = b":jaxserve "  # a comment in a stream begins with a colon
_NEWLINE = ord("\n")

_LARGEST = 2**63


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _is_sample(value: object) -> bool:
    """Return whether a value describes a delivered sample: prompt, sample, token ids, characters, is ended."""
    if not isinstance(value, list) or len(value) != 5 or not isinstance(value[2], list):
        return False
    return all(map(_is_count, [value[0], value[1], value[3], *value[2]])) and isinstance(value[4], bool)


@dataclass(frozen=True, slots=True)
class ReplyIdentity:
    """Values of a reply that do not depend on the server that makes it.

    Attributes:
        response_id: name of the reply.
        created_s: its date, in seconds since 1970.
        seed: sampling seed, unless the request has one.
    """

    response_id: str
    created_s: int
    seed: int

    @classmethod
    def from_header(cls, value: bytes) -> ReplyIdentity | None:
        """Return the identity in a value of HEADER; None if it is empty; BadRequestError if it is wrong."""
        if not value:
            return None
        words = value.decode("ascii", "replace").split(" ")
        is_right = len(words) == 3 and words[0].isalnum() and len(words[0]) <= 128 and all(map(_is_digits, words[1:]))
        if not is_right:
            name = HEADER.decode()
            raise BadRequestError(f"{name} must be a name, a date and a seed, got {brief(' '.join(words))}", name)
        return cls(words[0], int(words[1]), int(words[2]))

    def header(self) -> bytes:
        """Return the value of HEADER."""
        return f"{self.response_id} {self.created_s} {self.seed}".encode()


def _is_digits(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 20 and int(word) < _LARGEST


@dataclass(slots=True)
class DeliveredSample:
    """Part of one sample that the client has got.

    Attributes:
        token_ids: its tokens.
        num_chars: characters of its text.
        is_ended: True if the client has got its finish reason.
    """

    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    is_ended: bool = False


@dataclass(slots=True)
class Delivered:
    """Part of a stream that the client has got.

    Attributes:
        num_events: numbered events in it.
        samples: its samples by the indices of prompt and sample; those without a token may be absent.
    """

    num_events: int = 0
    samples: dict[tuple[int, int], DeliveredSample] = field(default_factory=dict)

    def add(self, comment: bytes) -> None:
        """Add the part of a stream that a comment describes, as `part_comment` has written it."""
        self.num_events, number, increments = json.loads(comment.removeprefix(COMMENT))
        for index, token_ids, num_chars, is_ended in increments:
            sample = self.samples.setdefault((number, index), DeliveredSample())
            sample.token_ids += token_ids
            sample.num_chars += num_chars
            sample.is_ended = bool(is_ended)

    @classmethod
    def from_comments(cls, comments: Iterable[bytes]) -> Delivered:
        """Return the part of a stream that its comments describe."""
        delivered = cls()
        for comment in comments:
            delivered.add(comment)
        return delivered

    def body_field(self) -> Json:
        """Return the value of FIELD."""
        samples = [[*key, each.token_ids, each.num_chars, each.is_ended] for key, each in self.samples.items()]
        return {"num_events": self.num_events, "samples": samples}

    @classmethod
    def take_from(cls, body: Json) -> Delivered | None:
        """Remove FIELD from a body and return its value; None without it; BadRequestError if it is wrong."""
        if (value := body.pop(FIELD, None)) is None:
            return None
        given = value if isinstance(value, dict) else {}
        num_events, samples = given.get("num_events", -1), given.get("samples")
        if not _is_count(num_events) or not isinstance(samples, list) or not all(map(_is_sample, samples)):
            form = "num_events, and samples as [prompt, sample, token ids, characters, is ended]"
            raise BadRequestError(f"{FIELD} must have {form}, got {brief(value)}", FIELD)
        found = {(number, index): DeliveredSample(ids, *rest) for number, index, ids, *rest in samples}
        return cls(num_events, found)


def part_comment(num_events: int, number: int = 0, increments: Iterable[Increment] = ()) -> bytes:
    """Return the comment after a part of a stream.

    Args:
        num_events: numbered events up to here.
        number: index of the prompt.
        increments: its outputs' increments in that part.
    """
    parts = [
        [each.completion.index, list(each.token_ids), len(each.text), int(each.finish_reason is not None)]
        for each in increments
    ]
    return COMMENT + json.dumps([num_events, number, parts], separators=(",", ":")).encode() + b"\n\n"


def split_at_comments(data: bytes) -> tuple[bytes, Sequence[bytes], bytes]:
    """Split a part of a stream, which begins with a line, at its comments.

    Returns:
        The events before the last complete comment, without comments; the comments; and the bytes after them.
    """
    events, comments = list[bytes](), list[bytes]()
    start, at = 0, data.find(COMMENT)
    while at >= 0 and (end := data.find(b"\n\n", at)) >= 0:
        if at == 0 or data[at - 1] == _NEWLINE:  # else a text has the same characters
            events.append(data[start:at])
            comments.append(data[at + len(COMMENT) : end])
            start = end + 2
        at = data.find(COMMENT, end)
    return b"".join(events), comments, data[start:]
