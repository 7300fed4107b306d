"""SessionCalls: handlers that save, restore, list and delete conversations, and llama.cpp's alias for two of them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from jaxserve.core.sessions import (
    RESTORING,
    NoSessionsError,
    RestoredSession,
    SavedSession,
    Session,
    SessionQuotaError,
    UnknownSessionError,
)
from jaxserve.errors import RequestError, brief
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.fields import TEXT, BodyReader, ObjectFields, needed
from jaxserve.server.request_classes import named_tenant
from jaxserve.server.streams import BrokenStepError, Stream

if TYPE_CHECKING:
    from jaxserve.server.call import Call
    from jaxserve.server.http import Json
    from jaxserve.server.service import Service

SESSIONS, SLOTS = "/v1/sessions", "/slots"
MAX_SLOT_LEN = 10  # digits
_ACTIONS = {"save", "restore"}
_FILE: ObjectFields = {"filename": needed(TEXT)}
Handler = Callable[["Call"], Awaitable[None]]


class SessionCalls:
    """Handlers for session paths. A name belongs to the key's owner.

    Args:
        service: engine and server state.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._engine = service, service.engine
        self._sessions = service.engine.sessions
        self._ids = itertools.count()

    def handler(self, method: str, path: str) -> Handler | None:
        """Return a path's handler; None if it has none."""
        return self._handlers(path).get(method)

    def methods(self, path: str) -> list[str]:
        """Return a path's HTTP methods."""
        return [*self._handlers(path)]

    def _handlers(self, path: str) -> dict[str, Handler]:
        """Return a path's handlers by method."""
        match path.removeprefix(SESSIONS).split("/") if path.startswith(SESSIONS) else ["-", *path.split("/")]:
            case [""]:
                return {"GET": self._list}
            case ["", name] if name:
                return {"DELETE": partial(self._delete, name)}
            case ["", name, action] if name and action in _ACTIONS:
                return {"POST": partial(self._save if action == "save" else self._restore, name)}
            case ["-", "", "slots", name] if name:
                return {"POST": partial(self._slot, name)}
        return {}

    async def _list(self, call: Call) -> None:
        """Reply with the owner's saved sessions."""
        saved = await call.in_workers(partial(_naming, self._sessions.list, _owner(call)))
        await call.send_json({"object": "list", "data": [_described(session) for session in saved]})

    async def _delete(self, name: str, call: Call) -> None:
        """Delete a saved session."""
        await call.in_workers(partial(_naming, self._sessions.delete, name, _owner(call)))
        await call.send_json({"id": name, "object": "session.deleted", "deleted": True})

    async def _save(self, name: str, call: Call) -> None:
        """Save a conversation's latest turn."""
        session, num_stored = await self._saved(call, name)
        await call.send_json(_described(session) | {"num_stored_tokens": num_stored})

    async def _restore(self, name: str, call: Call) -> None:
        """Load a saved session's pages, and compute the missing ones."""
        session, cached, num_computed = await self._restored(call, name)
        by_tier = asdict(cached)
        counts = {"cached_tokens": cached.total, "cached_tokens_by_tier": by_tier, "num_computed_tokens": num_computed}
        await call.send_json(_described(session) | counts)

    async def _slot(self, slot: str, call: Call) -> None:
        """Serve llama.cpp's actions: a slot is the conversation with the slot's number as its name."""
        action, began_s = parse_qs(call.query).get("action", [""])[0], time.monotonic()
        number = int(slot) if slot.isdecimal() and len(slot) <= MAX_SLOT_LEN else 0
        if action == "erase":
            num_tokens = await call.in_workers(partial(_naming, self._sessions.forget, slot, _owner(call)))
            await call.send_json({"id_slot": number, "n_erased": num_tokens})
            return
        if action not in _ACTIONS:
            raise BadRequestError(f"action must be save, restore or erase, got {brief(action)}", "action")
        file: str = BodyReader().read(await call.json(), _FILE)["filename"]
        reply: Json = {"id_slot": number, "filename": file}
        if action == "save":
            saved = await self._saved(call, slot, file)
            num_tokens, num_moved = len(saved.session.token_ids), saved.num_stored_tokens
        else:
            restored = await self._restored(call, file, slot)
            num_tokens, num_moved = len(restored.session.token_ids), restored.cached_tokens.total
        counts = ("n_saved", "n_written", "save_ms") if action == "save" else ("n_restored", "n_read", "restore_ms")
        num_bytes = await call.in_workers(partial(self._engine.host.kv_bytes, num_moved))
        taken_ms = (time.monotonic() - began_s) * 1e3
        await call.send_json(reply | {counts[0]: num_tokens, counts[1]: num_bytes, "timings": {counts[2]: taken_ms}})

    async def _saved(self, call: Call, name: str, saved_as: str | None = None) -> SavedSession:
        """Save a conversation, under another name if one is given."""
        save = partial(self._engine.save_session, name, _owner(call), saved_as=saved_as)
        return await call.in_workers(partial(_naming, save))

    async def _restored(self, call: Call, name: str, continued_as: str | None = None) -> RestoredSession:
        """Restore a session, as another conversation if one is named; its prompt is a request like any other."""
        session = await call.in_workers(partial(_naming, self._sessions.read, name, _owner(call)))
        session = session.renamed(continued_as or name)  # its prompt's end is noted under this name
        prompt = session.prompt(self._engine.schedule.max_total_tokens - 1)
        service, admission = self._service, self._service.admission
        admission.check_early(call.tenant)
        request_id = f"session-{next(self._ids)}"
        with admission.opened(call.tenant), call.watched():
            adapter = self._engine.adapters.request_for(session.adapter)
            group = self._engine.reader.read(request_id, prompt, RESTORING, tenant=_owner(call), lora_request=adapter)
            with admission.admitted(call.tenant, 0, [group], math.inf):
                stream = Stream([group], self._engine.frontend.lock, is_whole=True)
                await admission.turn(0, stream.through)
                try:
                    with service.streams.opened(stream):
                        await stream.run()
                except BrokenStepError as error:
                    message = "the engine could not compute the session; try again"
                    raise BadRequestError(message, None, "engine_error", 500) from error
        self._sessions.remember(session)
        return session.restored(group.output)


def _owner(call: Call) -> str:
    """Return the tenant whose sessions a request means, as for the requests that belong to them."""
    return named_tenant(call.headers, call.tenant)


def _naming(work: Callable[..., Any], *args: Any) -> Any:
    """Return the result of `work`; errors about sessions get their HTTP status."""
    try:
        return work(*args)
    except UnknownSessionError as error:
        raise BadRequestError(str(error), None, "session_not_found", 404) from error
    except NoSessionsError as error:
        raise BadRequestError(str(error), None, "sessions_not_supported", 501) from error
    except SessionQuotaError as error:
        raise BadRequestError(str(error), None, "session_quota_exceeded", 507) from error
    except BadRequestError:
        raise
    except RequestError as error:
        raise BadRequestError(str(error), None, "invalid_request") from error


def _described(session: Session) -> Json:
    """Return a session as a JSON object."""
    created = int(session.created_s)
    return {"id": session.name, "object": "session", "created": created, "num_tokens": len(session.token_ids)}
