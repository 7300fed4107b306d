"""Batch jobs: a thread runs batches one by one, tenants in turn, and survives restarts."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError
from jaxserve.openai.batch_files import run_batch
from jaxserve.openai.batch_output import numbered_lines
from jaxserve.server.batches.served_engine import ServedEngine
from jaxserve.server.batches.store import BATCH_OUTPUT, WAITING, Json, Store

if TYPE_CHECKING:
    from jaxserve.server.service import Service
    from jaxserve.server.streams import Streams

logger = logging.getLogger(__name__)

_OK = b'"response": {"status_code": 200,'
_SAVE_S = 1.0  # time between saves of the progress
RETRY_S = 10.0  # time between retries
SWEEP_S = 600.0  # time between searches for expired files
PATIENCE_S = 600.0  # for what other clients use, such as memory for images


class BatchEndedError(Exception):
    """End of a batch before its last line."""


class Jobs:
    """Thread that runs a store's batches.

    Args:
        store: files and batches.
        service: engine and server state.
        max_in_flight: maximum number of batch sequences in the engine.
    """

    def __init__(self, store: Store, service: Service, max_in_flight: int) -> None:
        self._store, self._service, self._max_in_flight = store, service, max_in_flight
        self._news = threading.Condition()
        self._is_stopped = False
        self._last_owner = ""
        self._swept_s = -math.inf
        self._thread: threading.Thread | None = None

    def start(self, streams: Streams) -> None:
        """Start the thread, which resumes unfinished batches and runs new ones with the server's streams."""
        self._thread = threading.Thread(target=self._run, args=(streams,), name="jaxserve batches", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; the next start of the server resumes unfinished batches."""
        with self._news:
            self._is_stopped = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join()

    def wake(self) -> None:
        """Let the thread look for a new or cancelled batch."""
        with self._news:
            self._news.notify_all()

    def _run(self, streams: Streams) -> None:
        """Run one batch after the other until stopped; on the thread."""
        while (batch := self._wait()) is not None:
            try:
                self._serve(batch, streams)
            except Exception as error:
                logger.exception("the batch %s has failed", batch["id"])
                self._fail_or_wait(batch["id"], "internal_error", f"the batch could not be run: {error!r}")

    def _wait(self) -> Json | None:
        """Wait for an unfinished batch and return it; None once stopped."""
        while True:
            self._sweep()
            with self._news:
                if self._is_stopped:
                    return None
                if (batch := self._next()) is not None:
                    return batch
                self._news.wait(SWEEP_S)

    def _sweep(self) -> None:
        """Delete expired files and batches if SWEEP_S seconds have passed since the last time."""
        if time.monotonic() - self._swept_s < SWEEP_S:
            return
        self._swept_s = time.monotonic()
        try:
            num_deleted = self._store.delete_expired(time.time())
        except OSError:
            logger.exception("files that have expired cannot be deleted")
        else:
            if num_deleted:
                logger.info("%d files and batches have expired and are deleted", num_deleted)

    def _next(self) -> Json | None:
        """Return the oldest unfinished batch of the tenant whose turn it is; None if there is none."""
        waiting = [x for x in self._store.objects("batch") if x["status"] in WAITING][::-1]
        owners = {x["id"]: self._store.owner(x["id"]) for x in waiting}
        waiting.sort(key=lambda x: (owners[x["id"]] <= self._last_owner, owners[x["id"]]))
        return waiting[0] if waiting else None

    def _serve(self, batch: Json, streams: Streams) -> None:
        """Run a batch to its end and store its results or its failure."""
        batch_id, owner = batch["id"], self._store.owner(batch["id"])
        self._last_owner = owner
        source = self._store.content(batch["input_file_id"])
        num_lines = _num_lines(source) if source.exists() else None
        if num_lines is None:
            message = "the input file was deleted before the batch began; upload it again"
            self._fail(batch_id, "invalid_file", message)
            return
        if not num_lines:
            self._fail(batch_id, "empty_file", "the input file must have a request in each line, got none")
            return
        if batch["status"] == "validating":
            counts = {"total": num_lines, "completed": 0, "failed": 0}
            self._store.update(batch_id, status="in_progress", in_progress_at=_now(), request_counts=counts)
            logger.info("%s of %s starts: %d lines", batch_id, owner, counts["total"])
        else:
            logger.info("%s of %s resumes: %s", batch_id, owner, _counted(batch))
        service = self._service
        engine = ServedEngine(service, streams, batch_id, owner, lambda: self._check(batch_id))
        saved_s = 0.0

        def on_record(num_records: int, num_errors: int) -> None:
            nonlocal saved_s
            if time.monotonic() - saved_s >= _SAVE_S:
                saved_s = time.monotonic()
                self._count(batch_id, num_records, num_errors)

        try:
            summary = run_batch(
                engine,
                source,
                self._store.records(batch_id),
                max_in_flight=self._max_in_flight,
                urls=(batch["endpoint"],),
                on_record=on_record,
                context=replace(service.context, salt=engine.salt),
                adapt=service.for_batch_line,
                patience_s=PATIENCE_S,
                use_tqdm=False,
            )
        except BatchEndedError as end:
            if not self._is_stopped:
                self._finish(batch_id, owner, str(end))
        except ConfigError as error:
            self._fail(batch_id, "invalid_file", str(error))
        else:
            self._count(batch_id, summary.num_records, summary.num_errors)
            self._finish(batch_id, owner, "completed")

    def _check(self, batch_id: str) -> None:
        """Raise BatchEndedError if a running batch must end: it was cancelled, has expired, or the server stops."""
        self._sweep()
        batch = self._store.get(batch_id)
        if self._is_stopped or batch is None:
            raise BatchEndedError("stopped")
        if batch["status"] == "cancelling":
            raise BatchEndedError("cancelled")
        if time.time() >= batch["expires_at"]:
            raise BatchEndedError("expired")

    def _count(self, batch_id: str, num_records: int, num_errors: int) -> None:
        """Store the progress of a batch: the numbers of its records and of failed ones."""
        batch = self._store.get(batch_id)
        if batch is not None:
            counts = {**batch["request_counts"], "completed": num_records - num_errors, "failed": num_errors}
            self._store.update(batch_id, request_counts=counts)

    def _finish(self, batch_id: str, owner: str, status: str) -> None:
        """Divide a batch's records into a results file and an error file, and store its final status."""
        self._store.update(
            batch_id, finalizing_at=_now(), **({"status": "finalizing"} if status == "completed" else {})
        )
        records = self._store.records(batch_id)
        uploads = {"output": self._store.new_upload(), "error": self._store.new_upload()}
        num_lines: Counter[str] = Counter()
        with uploads["output"].open("wb") as output, uploads["error"].open("wb") as error, records.open("rb") as source:
            for record in source:
                is_good = _OK in record  # client texts have escaped quotes
                (output if is_good else error).write(record)
                num_lines["output" if is_good else "error"] += 1
        self._count(batch_id, num_lines.total(), num_lines["error"])
        files: Json = {}
        for name, upload in uploads.items():
            if num_lines[name]:
                file = self._store.add_file(upload, f"{batch_id}_{name}.jsonl", BATCH_OUTPUT, owner)
                files[f"{name}_file_id"] = file["id"]
            else:
                upload.unlink()
        self._store.update(batch_id, status=status, **files, **{f"{status}_at": _now()})
        self._log_end(batch_id)
        records.unlink()

    def _log_end(self, batch_id: str, reason: str = "") -> None:
        """Log a batch's final status, time and counts."""
        if (batch := self._store.get(batch_id)) is not None:
            took_s = _now() - int(batch["in_progress_at"] if "in_progress_at" in batch else batch["created_at"])
            logger.info("%s is %s after %d s: %s%s", batch_id, batch["status"], took_s, _counted(batch), reason)

    def _fail_or_wait(self, batch_id: str, code: str, message: str) -> None:
        """Store that a batch has failed; if that fails too, as on a full disk, wait before the batch is tried again."""
        try:
            self._fail(batch_id, code, message)
        except OSError:
            logger.exception("the failure of %s cannot be noted", batch_id)
            with self._news:
                self._news.wait_for(lambda: self._is_stopped, RETRY_S)

    def _fail(self, batch_id: str, code: str, message: str) -> None:
        """Store that a batch has failed, with an error code and message, and log it."""
        error = {"code": code, "line": None, "message": message, "param": "input_file_id"}
        errors = {"object": "list", "data": [error]}
        self._store.update(batch_id, status="failed", failed_at=_now(), errors=errors)
        self._log_end(batch_id, f"; {message}")


def _counted(batch: Json) -> str:
    """Return a clause with a batch's numbers of lines, finished and failed."""
    counts = batch["request_counts"]
    return f"{counts['completed']} of {counts['total']} lines done, {counts['failed']} failed"


def _num_lines(source: Path) -> int:
    """Return the number of requests in a batch's input file."""
    with source.open("rb") as lines:
        return sum(1 for _ in numbered_lines(lines))


def _now() -> int:
    """Return the time in seconds since 1970."""
    return int(time.time())
