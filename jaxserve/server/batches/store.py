"""Files and batches on disk. A restarted server resumes from them.

A folder holds, for each file, `file-ID.json` and `file-ID.content`; for each batch, `batch_ID.json` and, while it runs,
`batch_ID.records`, which `run_batch` writes. Each JSON file is replaced as a whole.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from threading import RLock
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.system.whole_file import write_whole

Json = dict[str, Any]

WAITING = ("validating", "in_progress", "finalizing", "cancelling")
"""States of batches that have not ended."""

BATCH, BATCH_OUTPUT = "batch", "batch_output"  # purposes of files
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{24}")
_OWNER = "owner"  # entry that replies do not have


class Store:
    """Files and batches of all tenants, for any thread.

    Args:
        folder: directory, created if it does not exist.
        kept_s: time that files are kept.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(self, folder: Path, kept_s: int | float) -> None:
        self._folder, self._kept_s, self._lock = folder, kept_s, RLock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for left in folder.glob("*.upload"):
                left.unlink()
            self._objects = {path.stem: json.loads(path.read_bytes()) for path in folder.glob("*.json")}
        except (OSError, ValueError) as error:
            raise ConfigError(f"batch_dir must be a directory that the server can use, but: {error}") from error

    def new_upload(self) -> Path:
        """Return a new path to which an upload can be written."""
        return self._folder / f"{secrets.token_hex(12)}.upload"

    def add_file(self, content: Path, filename: str, purpose: str, owner: str) -> Json:
        """Add a file, whose `content` is moved from its path, for a tenant; return its object."""
        size = content.stat().st_size
        with content.open("rb") as file:
            os.fsync(file.fileno())
        file_id = f"file-{secrets.token_hex(12)}"
        content.replace(self.content(file_id))
        file_object = {
            "id": file_id,
            "object": "file",
            "bytes": size,
            "created_at": (now_s := int(time.time())),
            "expires_at": int(now_s + self._kept_s),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        self._save({**file_object, _OWNER: owner})
        return file_object

    def add_batch(self, fields: Json, owner: str) -> Json | None:
        """Add a batch with `fields` to be run; return its object, or None if its input file has been deleted."""
        batch = {"id": f"batch_{secrets.token_hex(12)}", "object": "batch", "created_at": int(time.time()), **fields}
        with self._lock:
            if batch["input_file_id"] not in self._objects:
                return None
            self._save({**batch, _OWNER: owner})
        return batch

    def update(self, object_id: str, **fields: Any) -> None:
        """Replace the given fields of a batch."""
        with self._lock:
            self._save({**self._objects[object_id], **fields})

    def get(self, object_id: str, owner: str | None = None) -> Json | None:
        """Return a file's or batch's object; None if there is none, or another tenant owns it."""
        found = self._objects.get(object_id) if _ID.fullmatch(object_id) else None
        if found is None or (owner is not None and found[_OWNER] != owner):
            return None
        return _without_owner(found)

    def owner(self, object_id: str) -> str:
        """Return the tenant that owns a file or batch."""
        return str(self._objects[object_id][_OWNER])

    def objects(self, kind: str, owner: str | None = None) -> Iterator[Json]:
        """Yield all files ("file") or batches ("batch"), of one tenant or of all, the newest first."""
        found = [x for x in list(self._objects.values()) if x["object"] == kind and owner in (None, x[_OWNER])]
        return map(_without_owner, sorted(found, key=lambda x: (x["created_at"], x["id"]), reverse=True))

    def num_bytes(self, owner: str) -> int:
        """Return the total size of a tenant's files."""
        files = [x for x in list(self._objects.values()) if x["object"] == "file" and x[_OWNER] == owner]
        return sum(file["bytes"] for file in files)

    def delete_file(self, file_id: str) -> str | None:
        """Delete a file, or return the id of the unfinished batch that reads it."""
        with self._lock:
            if (reader := self._readers().get(file_id)) is None:
                self._delete(file_id)
        return reader

    def delete_expired(self, now_s: int | float) -> int:
        """Delete the files and the ended batches that have been kept for their time; return their number.

        Files that an unfinished batch reads stay.
        """
        with self._lock:  # or a batch that is added meanwhile would lose its input
            read = self._readers()
            ended = [each for each in self.objects("batch") if each["status"] not in WAITING]
            expired = [each["id"] for each in ended if each[f"{each['status']}_at"] + self._kept_s <= now_s]
            for file in self.objects("file"):
                if file.get("expires_at", file["created_at"] + self._kept_s) <= now_s and file["id"] not in read:
                    expired.append(file["id"])
            for object_id in expired:
                self._delete(object_id)
        return len(expired)

    def content(self, file_id: str) -> Path:
        """Return the path to a file's content."""
        return self._folder / f"{file_id}.content"

    def records(self, batch_id: str) -> Path:
        """Return the path to a running batch's records."""
        return self._folder / f"{batch_id}.records"

    def _readers(self) -> dict[str, str]:
        """Return the ids of unfinished batches by the ids of their input files."""
        return {each["input_file_id"]: each["id"] for each in self.objects("batch") if each["status"] in WAITING}

    def _delete(self, object_id: str) -> None:
        """Delete a file or batch with all that belongs to it on disk."""
        self._objects.pop(object_id, None)
        (self._folder / f"{object_id}.json").unlink(missing_ok=True)
        for path in (self.content(object_id), self.records(object_id)):
            path.unlink(missing_ok=True)

    def _save(self, content: Json) -> None:
        """Write a file's or batch's object to disk, and keep it in memory."""
        with self._lock:
            write_whole(self._folder / f"{content['id']}.json", json.dumps(content).encode())
            self._objects[content["id"]] = content


def _without_owner(content: Json) -> Json:
    """Return an object as replies have it, without its owner."""
    return {name: value for name, value in content.items() if name != _OWNER}
