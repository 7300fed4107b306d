"""The process of one stage: measures its points one by one, and reports each in one JSON message per line.

    python -m device_report.worker \\
        '{"stage": "peak_rates", "device": "gpu", "dry_run": true, "deadline": 4e9, "skip": [], "only": ""}'

Library output goes to stderr. After a failed point, the process is useless: a device may be left in a state in which
everything fails.
"""

import importlib
import json
import os
import sys
import time
import traceback
from typing import Any, TextIO

from device_report.points import Point, UnavailableError


def main() -> None:
    replies = _take_stdout()
    task = json.loads(sys.argv[1])
    stage = importlib.import_module(f"device_report.{task['stage']}")
    _send(replies, {"machine": stage.machine()})
    for point in stage.points(task["device"], task["dry_run"]):
        if task["only"] in point.name and point.name not in task["skip"] and not _answer(replies, point, task):
            return
    _send(replies, {"done": True})


def _answer(replies: TextIO, point: Point, task: dict[str, Any]) -> bool:
    """Measure the point if there is time; False if the process cannot continue."""
    if time.time() + point.needs_s() > task["deadline"]:
        _send(replies, {"left_out": point.name})
        return True
    entry = {"kind": point.kind, **point.settings}
    _send(replies, {"began": point.name, "entry": entry})
    started = time.monotonic()
    try:
        entry |= point.measure()
    except UnavailableError as reason:
        entry["unavailable"] = str(reason)
    except Exception as error:
        traceback.print_exc()
        entry["failed"] = f"{type(error).__name__}: {error}"[:500]
    entry["took_s"] = round(time.monotonic() - started, 2)
    _send(replies, {"point": point.name, "entry": entry})
    return "failed" not in entry


def _take_stdout() -> TextIO:
    """Return stdout for messages only: later writes to stdout, even by native code, go to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _send(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
