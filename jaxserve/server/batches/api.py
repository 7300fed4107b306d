"""Handlers for OpenAI's files and batches."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from jaxserve.errors import brief
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import CHAT, COMPLETIONS, EMBEDDINGS
from jaxserve.server.batches.jobs import Jobs
from jaxserve.server.batches.quota import Quota
from jaxserve.server.batches.store import BATCH, WAITING, Json, Store
from jaxserve.server.batches.upload import receive_form

if TYPE_CHECKING:
    from jaxserve.server.call import Call
    from jaxserve.server.service import Service

FILES, BATCHES = "/v1/files", "/v1/batches"
JSON_LINES_TYPE = b"application/octet-stream"

_DAY_S = 24 * 3600
_WINDOW_S = {"24h": 24 * 3600}
_MAX_METADATA, _MAX_NAME_CHARS, _MAX_VALUE_CHARS = 16, 64, 512  # OpenAI's limits
_MAX_UNFINISHED = 64  # batches per tenant
_MAX_LISTED = {"file": 10_000, "batch": 100}
_LISTED = {"file": 10_000, "batch": 20}  # default limits of lists
_BLOCK_BYTES = 2**16
_PATH = re.compile(rf"({FILES}|{BATCHES})/([^/]+)(/content|/cancel)?")

Handler = Callable[["Call"], Awaitable[None]]


class Batches:
    """A server's files and batches.

    Args:
        service: engine and server state.
        folder: directory for files and batches.
    """

    def __init__(self, service: Service, folder: Path) -> None:
        self._service, self._config = service, service.config
        self._store = Store(folder, self._config.batch_retention_days * _DAY_S)
        self._quota = Quota(self._store, self._config.max_batch_storage_bytes)
        self._endpoints = (COMPLETIONS, CHAT) if service.engine.arch.pooler is None else (EMBEDDINGS,)
        self._jobs = Jobs(self._store, service, max(1, service.num_slots // 2))
        self._handlers: dict[tuple[str, str], Handler] = {
            ("POST", FILES): self._upload,
            ("GET", FILES): self._list,
            ("GET", f"{FILES}/ID"): self._retrieve,
            ("GET", f"{FILES}/ID/content"): self._send_content,
            ("DELETE", f"{FILES}/ID"): self._delete,
            ("POST", BATCHES): self._create,
            ("GET", BATCHES): self._list,
            ("GET", f"{BATCHES}/ID"): self._retrieve,
            ("POST", f"{BATCHES}/ID/cancel"): self._cancel,
        }

    def start(self) -> None:
        """Resume unfinished batches and run new ones; to be called on the event loop, after the service has started."""
        self._jobs.start(self._service.streams)

    def stop(self) -> None:
        """Stop running batches; the next start resumes unfinished ones."""
        self._jobs.stop()

    def handler(self, method: str, path: str) -> Handler | None:
        """Return the handler for a method and path; None if there is none."""
        return self._handlers.get((method, _pattern(path)))

    def methods(self, path: str) -> list[str]:
        """Return the HTTP methods that a path may be called with."""
        return [method for method, known in self._handlers if known == _pattern(path)]

    # Files

    async def _upload(self, call: Call) -> None:
        """Store the file in a form, and reply with its object."""
        config, path = self._config, self._store.new_upload()
        with self._quota.upload(call.owner) as reservation:
            try:
                form = await receive_form(
                    call.receive,
                    call.headers,
                    path,
                    max_bytes=config.max_batch_file_bytes,
                    timeout_s=config.body_timeout_s,
                    hold=reservation.hold,
                )
                if unknown := form.fields.keys() - {"purpose"}:
                    raise BadRequestError(f"{min(unknown)} is not supported in files; leave it out", min(unknown))
                if (purpose := form.fields.get("purpose")) != BATCH:
                    raise BadRequestError(f'purpose must be "{BATCH}", got {brief(purpose)}', "purpose")
                reservation.settle(path.stat().st_size)
                added = await asyncio.to_thread(self._store.add_file, path, form.filename, purpose, call.owner)
            finally:
                path.unlink(missing_ok=True)
        await call.send_json(added)

    async def _send_content(self, call: Call) -> None:
        """Reply with the content of the file that the path names."""
        file = self._find(call, "file")
        path = self._store.content(file["id"])
        headers = [(b"content-disposition", b"attachment")]
        await call.send_pieces(_blocks(path), 200, JSON_LINES_TYPE, headers)

    async def _delete(self, call: Call) -> None:
        """Delete the file that the path names, unless an unfinished batch reads it."""
        file = self._find(call, "file")
        if (reader := await asyncio.to_thread(self._store.delete_file, file["id"])) is not None:
            raise BadRequestError(
                f"{file['id']} must not be the input of an unfinished batch, but {reader} reads it; cancel that first",
                "file_id",
                "file_in_use",
                409,
            )
        await call.send_json({"id": file["id"], "object": "file", "deleted": True})

    # Batches

    async def _create(self, call: Call) -> None:
        """Add the batch that the body describes, and reply with its object."""
        body = await call.json()
        if unknown := body.keys() - {"input_file_id", "endpoint", "completion_window", "metadata"}:
            raise BadRequestError(f"{min(unknown)} is not supported in batches; leave it out", min(unknown))
        file_id, endpoint = body.get("input_file_id"), body.get("endpoint")
        file = self._store.get(file_id, call.owner) if isinstance(file_id, str) else None
        message = f'input_file_id must be the id of a file with purpose "{BATCH}", got {brief(file_id)}'
        no_file = BadRequestError(message, "input_file_id")
        if file is None or file["purpose"] != BATCH:
            raise no_file
        if endpoint not in self._endpoints:
            message = f"endpoint must be {' or '.join(self._endpoints)}, got {brief(endpoint)}"
            raise BadRequestError(message, "endpoint")
        if (window := body.get("completion_window", "24h")) not in _WINDOW_S:
            message = f"completion_window must be one of {list(_WINDOW_S)}, got {brief(window)}"
            raise BadRequestError(message, "completion_window")
        unfinished = [each for each in self._store.objects("batch", call.owner) if each["status"] in WAITING]
        if len(unfinished) >= _MAX_UNFINISHED:
            message = f"a key must have fewer than {_MAX_UNFINISHED} unfinished batches, got one more; wait for an end"
            raise BadRequestError(message, None, "too_many_batches", 429)
        fields = {
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file_id,
            "completion_window": window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "expires_at": int(time.time()) + _WINDOW_S[window],
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": _metadata(body.get("metadata")),
            "model": self._service.model_names[0],
        }
        batch = await asyncio.to_thread(self._store.add_batch, fields, call.owner)
        if batch is None:
            raise no_file
        self._jobs.wake()
        await call.send_json(batch)

    async def _cancel(self, call: Call) -> None:
        """Cancel the batch that the path names, and reply with its object."""
        batch = self._find(call, "batch")
        if batch["status"] not in ("validating", "in_progress", "cancelling"):
            message = f"a batch must be unfinished to be cancelled, and {batch['id']} is {batch['status']}"
            raise BadRequestError(message, "batch_id", "batch_ended", 409)
        if batch["status"] != "cancelling":
            fields = {"status": "cancelling", "cancelling_at": int(time.time())}
            await asyncio.to_thread(lambda: self._store.update(batch["id"], **fields))
        self._jobs.wake()
        await call.send_json(self._store.get(batch["id"]) or batch)

    # Both

    async def _retrieve(self, call: Call) -> None:
        """Reply with the object of the file or batch that the path names."""
        await call.send_json(self._find(call, _kind(call.path)))

    async def _list(self, call: Call) -> None:
        """Reply with a page of the tenant's files or batches, which the query selects."""
        kind, query = _kind(call.path), parse_qs(call.query)
        found = list(self._store.objects(kind, call.owner))
        if purpose := query.get("purpose"):
            found = [each for each in found if each.get("purpose") == purpose[-1]]
        if query.get("order", ["desc"])[-1] == "asc":
            found.reverse()
        if after := query.get("after"):
            ids = [each["id"] for each in found]
            if after[-1] not in ids:
                raise BadRequestError(f"after must be the id of a {kind}, got {brief(after[-1])}", "after")
            found = found[ids.index(after[-1]) + 1 :]
        limit = _limit(query.get("limit", [str(_LISTED[kind])])[-1], _MAX_LISTED[kind])
        shown = found[:limit]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        has_more = len(found) > limit
        await call.send_json(
            {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": has_more}
        )

    def _find(self, call: Call, kind: str) -> Json:
        """Return the "file" or "batch" that the path names; BadRequestError (404) if the tenant has no such one."""
        match = _PATH.fullmatch(call.path)
        assert match is not None, "the handler was found by the path"
        found = self._store.get(match[2], call.owner)
        if found is None or found["object"] != kind:
            raise BadRequestError(f"there is no {kind} {brief(match[2])}", f"{kind}_id", "not_found", 404)
        return found


def _pattern(path: str) -> str:
    """Return a path with ID for the id of a file or batch, as the keys of the handlers have it."""
    match = _PATH.fullmatch(path)
    return path if match is None else f"{match[1]}/ID{match[3] or ''}"


def _kind(path: str) -> str:
    """Return "file" or "batch", by the beginning of a path."""
    return "file" if path.startswith(FILES) else "batch"


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's content in blocks."""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def _limit(text: str, largest: int) -> int:
    """Return the query's limit of listed objects; BadRequestError if it is not an integer in [1, largest]."""
    if not text.isdecimal() or not 1 <= int(text[:9]) <= largest:
        raise BadRequestError(f"limit must be an integer in [1, {largest}], got {brief(text)}", "limit")
    return int(text)


def _metadata(given: Any) -> dict[str, str] | None:
    """Return a batch's `metadata` if it is within OpenAI's limits; BadRequestError if not."""
    if given is None:
        return None
    are_texts = isinstance(given, dict) and all(
        isinstance(value, str) and len(name) <= _MAX_NAME_CHARS and len(value) <= _MAX_VALUE_CHARS
        for name, value in given.items()
    )
    if not are_texts or len(given) > _MAX_METADATA:
        raise BadRequestError(
            f"metadata must have at most {_MAX_METADATA} texts of at most {_MAX_VALUE_CHARS} characters, under names "
            f"of at most {_MAX_NAME_CHARS}, got {brief(given)}",
            "metadata",
        )
    return dict(given)
