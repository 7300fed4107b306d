"""SavedSessions: conversations of an LLM that outlive it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.core.sessions import RESTORING, RestoredSession, SavedSession, Session

if TYPE_CHECKING:
    from jaxserve.assembly.engine import Engine
    from jaxserve.offline.offline_calls import Calls


class SavedSessions:
    """Conversations by name, the `group` of their requests' `ReuseHint`; for an engine with `kv_offloading_path`.

    All methods raise RequestError if the engine has no pages on disk, or there is no such session.
    """

    def __init__(self, engine: Engine, calls: Calls) -> None:
        self._engine, self._calls = engine, calls

    def save(self, name: str) -> SavedSession:
        """Save the latest turn of a conversation to disk: its tokens, and its full pages."""
        return self._engine.save_session(name)

    def restore(self, name: str) -> RestoredSession:
        """Load the pages of a saved session, and compute the missing ones, so that it continues immediately.

        Its tokens are in the result: a prompt that begins with them continues it.
        """
        sessions = self._engine.sessions
        session = sessions.read(name)
        prompt = session.prompt(self._engine.schedule.max_total_tokens - 1)
        adapter = self._engine.adapters.request_for(session.adapter)
        (output,) = self._calls.run([prompt], [RESTORING], use_tqdm=False, lora_requests=[adapter])
        sessions.remember(session)
        return session.restored(output)

    def list(self) -> list[Session]:
        """Return all saved sessions, the latest first."""
        return self._engine.sessions.list()

    def delete(self, name: str) -> None:
        """Delete a saved session. Its pages age as others do."""
        self._engine.sessions.delete(name)
