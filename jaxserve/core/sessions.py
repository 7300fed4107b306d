"""Sessions: conversations that can be saved by name, and continued by a later engine.

The engine remembers each conversation's latest tokens, by its `ReuseHint.group`. Saving a conversation writes them to a
file next to the disk tier's pages, after the pages themselves, and its images' patches to another file. Nothing depends
on the pages: missing ones are computed again, and a page is found only by its hash over salt, tokens and images, in a
file for the same weights.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.api.cached_tokens import CachedTokens
from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.token_ids import TokenIds
from jaxserve.core import session_images
from jaxserve.core.prompt import USER_SALT
from jaxserve.errors import RequestError, brief
from jaxserve.images.prepared import ExpandedPrompt, ImageSpan, num_patch_bytes, without_patches
from jaxserve.scheduling.kv_cache.prefix_hashes import CachedSequence
from jaxserve.system.whole_file import write_whole

if TYPE_CHECKING:
    from jaxserve.api.outputs import RequestOutput
    from jaxserve.core.growing_outputs import RequestGroup

logger = logging.getLogger(__name__)

MAX_TURNS = 4096  # conversations whose latest turn is remembered
MAX_TOKENS = 2**24  # tokens in these, of up to 40 bytes each
MAX_PATCH_BYTES = 2**29  # patches of their images
MAX_NAME_LEN = 256
_VERSION = 2
RESTORING = SamplingParams(temperature=0, max_tokens=1, detokenize=False)  # parameters for `Session.prompt`


class UnknownSessionError(RequestError):
    """There is no conversation with this name."""


class UnreadableSessionError(UnknownSessionError):
    """The file of a saved conversation has another format, or is damaged."""


class NoSessionsError(RequestError):
    """The engine cannot save conversations."""


class SessionQuotaError(RequestError):
    """An owner's saved conversations are too many or too large."""


class SessionQuota(NamedTuple):
    """Limits for the saved conversations of one owner.

    Attributes:
        max_sessions: maximum number.
        max_bytes: maximum total file size.
    """

    max_sessions: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation, up to a turn's end.

    Attributes:
        name: its name, unique for a tenant.
        token_ids: the turn's prompt and output.
        salt: prefix cache namespace for its pages.
        tenant: owner; empty without tenants.
        created_s: time when it was saved, in seconds since 1970; 0 before.
        images: images in its prompt; without their patches if it is from a list.
        adapter: digest of the turn's LoRA adapter; empty for the base model.
        adapter_start: first token with the adapter.
    """

    name: str
    token_ids: TokenIds
    salt: str
    tenant: str = ""
    created_s: float = 0.0
    images: tuple[ImageSpan, ...] = ()
    adapter: str = ""
    adapter_start: int = 0

    @property
    def pages(self) -> CachedSequence:
        """All that its pages depend on."""
        salt = self.salt.encode(errors="surrogatepass")
        return CachedSequence(self.token_ids, salt, without_patches(self.images), self.adapter, self.adapter_start)

    def prompt(self, max_tokens: int) -> dict[str, Any]:
        """Return the prompt that loads or computes its pages, of at most `max_tokens` tokens."""
        salt = self.salt.removeprefix(USER_SALT)
        hint = ReuseHint(self.name)
        end = min([max_tokens, *(span.start for span in self.images if span.end > max_tokens)])
        images = [span for span in self.images if span.end <= end]
        token_ids = ExpandedPrompt(self.token_ids[:end], images)
        return {"prompt_token_ids": token_ids, "cache_salt": salt or None, "reuse": hint}

    def renamed(self, name: str) -> Session:
        """Return a session with another name."""
        return replace(self, name=name)

    def restored(self, output: RequestOutput) -> RestoredSession:
        """Return the result, given the output for its prompt."""
        cached = output.cached_tokens
        return RestoredSession(self, cached, len(output.prompt_token_ids) - cached.total)


class SavedSession(NamedTuple):
    """Result of saving a session.

    Attributes:
        session: what was saved.
        num_stored_tokens: number of its first tokens whose keys and values are on disk; the others are computed again.
    """

    session: Session
    num_stored_tokens: int


class RestoredSession(NamedTuple):
    """Result of restoring a session.

    Attributes:
        session: the conversation, which can be continued.
        cached_tokens: its tokens whose keys and values were found, by tier.
        num_computed_tokens: number of its tokens that were computed again.
    """

    session: Session
    cached_tokens: CachedTokens
    num_computed_tokens: int


class Sessions:
    """Latest turns of conversations, and the saved ones. Callable from any thread.

    Args:
        directory: where saved ones lie; None if none can be saved.
        quota: limits for each owner; None for none.
    """

    def __init__(self, directory: Path | None, quota: SessionQuota | None = None) -> None:
        self._directory, self._quota = directory, quota
        self._writing = threading.Lock()  # held from the check of the quota until the file is written
        self._latest: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._num_tokens = self._num_patch_bytes = 0  # latest turns only
        self._lock = threading.Lock()  # guards all three
        self._reported: set[Path] = set()  # unreadable files about which the log has a line

    @classmethod
    def at(cls, kv_offloading_path: str | None, quota: SessionQuota, *, has_prefix_cache: bool) -> Sessions:
        """Return sessions for an engine whose disk tier is at this path; None is no disk tier."""
        if kv_offloading_path is None or not has_prefix_cache:
            return cls(None)
        return cls(Path(kv_offloading_path) / "sessions", quota)

    def note(self, group: RequestGroup) -> None:
        """Remember a request that has ended as its conversation's latest turn, if it has a conversation."""
        request = group.requests[0]
        if self._directory is None or request.reuse is None or not request.reuse.group or group.error:
            return
        tokens = [*request.prompt_token_ids, *group.output.outputs[0].token_ids]
        salt = request.salt.decode(errors="surrogatepass")
        adapter = request.adapter, request.adapter_start
        self.remember(Session(request.reuse.group, tokens, salt, request.tenant, 0.0, request.images, *adapter))

    def remember(self, session: Session) -> None:
        """Make a session its conversation's latest turn."""
        key = session.tenant, session.name
        with self._lock:
            self._remove(key)
            self._latest[key] = session
            self._num_tokens += len(session.token_ids)
            self._num_patch_bytes += num_patch_bytes(session.images)
            while (
                len(self._latest) > MAX_TURNS
                or self._num_tokens > MAX_TOKENS
                or self._num_patch_bytes > MAX_PATCH_BYTES
            ):
                self._remove(next(iter(self._latest)))

    def latest(self, name: str, tenant: str = "") -> Session:
        """Return the latest turn of a conversation; UnknownSessionError if there is none."""
        self._require()
        if (session := self._latest.get((tenant, name))) is None:
            raise UnknownSessionError(
                f"no request of this engine belongs to the session {brief(name)}, or later ones of other sessions "
                "have too many tokens or images; give its requests this session_id, or a ReuseHint with this group"
            )
        return session

    def forget(self, name: str, tenant: str = "") -> int:
        """Forget the latest turn of a conversation; return its number of tokens."""
        self._require()
        with self._lock:
            return self._remove((tenant, name))

    def check_quota(self, name: str, tenant: str = "") -> None:
        """Raise SessionQuotaError if an owner may save nothing under a name, whatever its size."""
        self._check_quota(self._path(name, tenant), tenant, 0)

    def write(self, session: Session, name: str) -> Session:
        """Write a session durably under a name, and return it as it was written.

        Raises:
            SessionQuotaError: the owner may not save it in addition to the others.
            RequestError: the name is too long, or the file cannot be written.
        """
        path = self._path(name, session.tenant)
        saved = replace(session, name=name, created_s=time.time())
        content = _pack(saved)
        patches = session_images.pack_patches(session.images) if session.images else b""
        with self._writing:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._check_quota(path, session.tenant, len(content) + len(patches))
                if patches:
                    write_whole(_patches_path(path, saved), patches, is_durable=True)
                write_whole(path, content, is_durable=True)
                _drop_patches(path, saved)
            except OSError as error:
                raise RequestError(f"the session {brief(name)} cannot be saved: {error.strerror}") from error
        return saved

    def _check_quota(self, path: Path, tenant: str, num_bytes: int) -> None:
        """Raise SessionQuotaError if an owner may not have a file of this size in addition to the others."""
        if self._quota is None:
            return
        num_others = sum(each != path for each in self._files(tenant))
        files = self._require().glob(f"{_digest(tenant)}-*")
        others = [_size(each) for each in files if not each.name.startswith(path.stem)]
        max_sessions, max_bytes = self._quota
        if num_others >= max_sessions:
            raise SessionQuotaError(
                f"max_saved_sessions={max_sessions:,} conversations are saved already; delete one, or raise it"
            )
        if sum(others) + num_bytes > max_bytes:
            raise SessionQuotaError(
                f"saved conversations must take at most {max_bytes:,} bytes (saved_sessions_size), and this one would "
                f"make it {sum(others) + num_bytes:,}; delete others, or raise it"
            )

    def read(self, name: str, tenant: str = "") -> Session:
        """Return a saved session; UnknownSessionError if there is none, or it cannot be read."""
        path = self._path(name, tenant)
        with self._writing:  # a writer replaces two files
            session = _read(path)
            if session is None or (session.name, session.tenant) != (name, tenant):
                raise _unknown(name)
            if not session.images:
                return session
            return replace(session, images=session_images.read_patches(session.images, _patches_path(path, session)))

    def list(self, tenant: str = "") -> list[Session]:
        """Return a tenant's saved sessions that can be read, the latest first."""
        found = [self._read_listed(path) for path in self._files(tenant)]
        own = [session for session in found if session is not None and session.tenant == tenant]
        return sorted(own, key=lambda session: -session.created_s)

    def delete(self, name: str, tenant: str = "") -> None:
        """Delete a saved session, also an unreadable one; UnknownSessionError if there is none.

        Its pages age as others do.
        """
        path = self._path(name, tenant)
        with self._writing:
            try:
                path.unlink()
            except FileNotFoundError:
                raise _unknown(name) from None
            except OSError as error:
                raise RequestError(f"the session {brief(name)} cannot be deleted: {error.strerror}") from error
            _drop_patches(path)

    def _read_listed(self, path: Path) -> Session | None:
        """Return the session in a file; None, after one line in the log, if it cannot be read."""
        try:
            return _read(path)
        except UnreadableSessionError as error:
            if path not in self._reported:
                self._reported.add(path)
                logger.warning("a saved session is not listed: %s: %s", path, error)
            return None

    def _remove(self, key: tuple[str, str]) -> int:
        """Forget the latest turn of a conversation, if it is known; return its number of tokens."""
        session = self._latest.pop(key, None)
        if session is None:
            return 0
        self._num_tokens -= len(session.token_ids)
        self._num_patch_bytes -= num_patch_bytes(session.images)
        return len(session.token_ids)

    def _require(self) -> Path:
        """Return the directory; NoSessionsError if there is none."""
        if self._directory is None:
            raise NoSessionsError(
                "sessions are saved next to pages on disk, and this engine has none; start it with kv_offloading_path "
                "and enable_prefix_caching"
            )
        return self._directory

    def _path(self, name: str, tenant: str) -> Path:
        """Return the file of a session, whose name tells nothing."""
        if not 0 < len(name) <= MAX_NAME_LEN:
            raise RequestError(f"the name of a session must have 1 to {MAX_NAME_LEN} characters, got {len(name)}")
        return self._require() / f"{_digest(tenant)}-{_digest(tenant, name)}.json"

    def _files(self, tenant: str) -> tuple[Path, ...]:
        """Return the files of a tenant's saved sessions."""
        return (*self._require().glob(f"{_digest(tenant)}-*.json"),)


def _size(path: Path) -> int:
    """Return a file's size; 0 if it was deleted meanwhile by another engine."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _digest(*names: str) -> str:
    """Return a part of a file's name that does not tell these names."""
    return blake2b(json.dumps(names).encode(), digest_size=16).hexdigest()


def _patches_path(path: Path, session: Session) -> Path:
    """Return the file beside a session's that has its images' patches."""
    return path.with_name(f"{path.stem}-{session_images.content_name(session.images)}.npz")


def _drop_patches(path: Path, kept: Session | None = None) -> None:
    """Delete the patches beside a session's file that the current session does not use."""
    own = None if kept is None or not kept.images else _patches_path(path, kept)
    for each in path.parent.glob(f"{path.stem}-*.npz"):
        if each != own:
            each.unlink(missing_ok=True)


def _pack(session: Session) -> bytes:
    """Return a session's file: its fields as JSON, and their checksum, as a flipped bit may be another valid token."""
    content = {field.name: getattr(session, field.name) for field in fields(session)}
    text = json.dumps(content | {"images": list(map(session_images.to_json, session.images))})
    return json.dumps({"version": _VERSION, "checksum": _checksum(text), "session": text}).encode()


def _checksum(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _unknown(name: str) -> UnknownSessionError:
    return UnknownSessionError(f"there is no saved session {brief(name)}; save it first")


def _read(path: Path) -> Session | None:
    """Return the session in a file; None if there is none.

    Raises:
        UnreadableSessionError: the file has another version's format, or is damaged.
    """
    try:
        return _unpack(path.read_bytes())
    except FileNotFoundError:
        return None
    except UnreadableSessionError:
        raise
    except OSError as error:
        raise _unreadable(f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _unreadable("is damaged") from error


def _unpack(content: bytes) -> Session:
    """Return the session that `_pack` has written; an error of some type for other contents."""
    file: Any = json.loads(content)
    if (version := file["version"]) != _VERSION:
        raise _unreadable(f"has format {brief(version)}, and this version of jaxserve reads format {_VERSION}")
    if file["checksum"] != _checksum(file["session"]):
        raise _unreadable("is damaged")
    values: Any = json.loads(file["session"])
    images = tuple(session_images.from_json(*each) for each in values.pop("images", ()))
    return Session(**values, images=images)


def _unreadable(problem: str) -> UnreadableSessionError:
    return UnreadableSessionError(
        f"the saved session {problem}; send its conversation again with the same name, and save it again"
    )
