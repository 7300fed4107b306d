"""Uploads: multipart bodies, written to disk as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from python_multipart import FormParser, create_form_parser
from python_multipart.exceptions import FormParserError

from jaxserve.openai.errors import BadRequestError
from jaxserve.server.http import ClientGoneError, header_value

if TYPE_CHECKING:
    from jaxserve.server.http import Headers, Receive

_FILE = "file"
_MAX_FIELD_BYTES = 4096
_MAX_FORM_BYTES = 2**16  # body limit without the file


@dataclass(slots=True)
class Upload:
    """Form with a file, as received.

    Attributes:
        filename: name that the client gave it.
        fields: other fields of the form.
    """

    filename: str = ""
    fields: dict[str, str] = field(default_factory=dict)


async def receive_form(
    receive: Receive, headers: Headers, path: Path, *, max_bytes: int, timeout_s: float, hold: Callable[[int], None]
) -> Upload:
    """Receive a multipart form, write its part `file` to `path`, and return the form.

    Args:
        receive: function that returns the next part of the request.
        headers: headers of the request.
        path: file to write.
        max_bytes: limit of the file.
        timeout_s: maximum time between two parts of the body.
        hold: function called with the file's minimum size, before it is read if the body's length is known, and as it
            comes; it raises BadRequestError if the quota is exceeded.

    Raises:
        BadRequestError: the body is no such form, too large (413) or too slow (408).
        ClientGoneError: the client has gone.
    """
    upload = Upload()
    files: list[Any] = []

    def on_field(field: Any) -> None:
        upload.fields[field.field_name.decode(errors="replace")] = (field.value or b"").decode(errors="replace")

    types = {"Content-Type": header_value(headers, b"content-type")}
    config = {"UPLOAD_DIR": str(path.parent), "MAX_MEMORY_FILE_SIZE": 2**16}
    try:
        parser: FormParser = create_form_parser(types, on_field, files.append, config=config)
        hold(_declared_bytes(header_value(headers, b"content-length")) - _MAX_FORM_BYTES)
        await _feed(parser, receive, max_bytes, timeout_s, hold)
        (file,) = [each for each in files if each.field_name == _FILE.encode()]
    except BadRequestError:
        raise
    except (FormParserError, ValueError) as error:
        raise BadRequestError(
            f"a file must be uploaded as multipart/form-data with the parts `purpose` and `file`, but: {error}", "file"
        ) from None
    finally:
        for each in files:
            if each.field_name != _FILE.encode():
                each.close()
    if file.size > max_bytes:
        file.close()
        raise _too_large(max_bytes)
    upload.filename = (file.file_name or b"file").decode(errors="replace")[:_MAX_FIELD_BYTES]
    await asyncio.to_thread(_save, file, path)
    return upload


def _declared_bytes(length: bytes) -> int:
    """Return the size in a content-length header; 0 if there is none."""
    return int(length) if length.isdigit() and len(length) < 16 else 0


async def _feed(
    parser: FormParser, receive: Receive, max_bytes: int, timeout_s: float, hold: Callable[[int], None]
) -> None:
    """Feed the parts of a request's body to the form parser; arguments and errors as in `receive_form`."""
    num_bytes = 0
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                message = await receive()
        except TimeoutError:
            raise BadRequestError(
                f"a part of a body must arrive within {timeout_s:g} s", None, "timeout", 408
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes + _MAX_FORM_BYTES:
            raise _too_large(max_bytes)
        hold(num_bytes - _MAX_FORM_BYTES)
        parser.write(part)
        if not message.get("more_body", False):
            parser.finalize()
            return


def _too_large(max_bytes: int) -> BadRequestError:
    """Return the error (413) for a file with more than `max_bytes` bytes."""
    message = f"a file must have at most {max_bytes} bytes; divide it into several"
    return BadRequestError(message, "file", "too_large", 413)


def _save(file: Any, path: Path) -> None:
    """Copy the content of the form parser's file to `path`."""
    source = file.file_object
    source.seek(0)
    with path.open("wb") as target:
        while block := source.read(2**20):
            target.write(block)
    file.close()
