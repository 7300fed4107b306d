"""Driver of a report: runs parts, whose stages are separate processes, within their time limits.

Each stage is restarted after a failure; every point is written when it is measured.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from device_report import plots, tables
from device_report.document import Document

ROOT = Path(__file__).parents[2]
WORKER = (sys.executable, "-m", "device_report.worker")
GRACE_S = 30  # extra time for the point that runs at the time limit
LAST_S = 20  # time for a process that only reports which points it leaves out


class Stage(NamedTuple):
    """A process in a part, and its maximum part of the time relative to later stages."""

    name: str
    share: float


Parts = Mapping[str, tuple[Stage, ...]]


class Options(NamedTuple):
    """Options for measuring a part."""

    dry_run: bool
    missing: bool
    only: str


def measure(
    document: Document, part: str, stages: Sequence[Stage], minutes: float, options: Options, log: TextIO
) -> None:
    """Run all stages of a part, one after the other."""
    end_s = time.time() + 60 * minutes
    for index, stage in enumerate(stages):
        rest = sum(later.share for later in stages[index:])
        deadline = time.time() + (end_s - time.time()) * stage.share / rest
        StageRun(document, part, stage.name, deadline, options, log).run()


class StageRun:
    """A stage until its time limit, in one process after the other."""

    def __init__(
        self, document: Document, part: str, stage: str, deadline: float, options: Options, log: TextIO
    ) -> None:
        self._document, self._part, self._stage = document, part, stage
        self._deadline, self._options, self._log = deadline, options, log
        self._skip = document.measured(part, stage) if options.missing else []
        self._has_begun = False

    def run(self) -> None:
        """Measure, and continue after each failed point."""
        while self._run_process():
            pass

    def _run_process(self) -> bool:
        """Measure the remaining points; return whether a point failed, after which a new process must continue."""
        task = {
            "stage": self._stage,
            "device": self._document.device,
            "dry_run": self._options.dry_run,
            "deadline": self._deadline,
            "skip": self._skip,
            "only": self._options.only,
        }
        process = subprocess.Popen(
            [*WORKER, json.dumps(task)],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment(self._options.dry_run),
            process_group=0,  # so that its children end with it
        )
        timer = threading.Timer(max(LAST_S, self._deadline + GRACE_S - time.time()), _kill, [process])
        timer.start()
        try:
            return self._follow(process)
        finally:
            timer.cancel()
            _kill(process)
            process.communicate()

    def _follow(self, process: "subprocess.Popen[str]") -> bool:
        began: tuple[str, dict[str, Any]] | None = None
        assert process.stdout is not None
        for line in process.stdout:
            match json.loads(line):
                case {"machine": machine}:
                    self._begin(machine)
                case {"left_out": name}:
                    self._document.leave_out(self._part, self._stage, name)
                case {"began": name, "entry": entry}:
                    began = name, entry
                case {"point": name, "entry": entry}:
                    began = None
                    self._put(name, entry)
                    if "failed" in entry:
                        return True
                case {"done": True}:
                    return False
        return self._died(process, began)

    def _begin(self, machine: dict[str, Any]) -> None:
        if not self._options.dry_run and machine["platform"] not in (None, self._document.device):
            what = f"a {self._document.device.upper()}, and there is only {machine['device']}"
            raise SystemExit(f"{self._stage} needs {what}; try --dry-run")
        if not self._has_begun:
            self._document.begin(self._part, self._stage, machine)
        self._has_begun = True

    def _put(self, name: str, entry: dict[str, Any]) -> None:
        self._skip.append(name)
        self._document.put(self._part, self._stage, name, entry)
        print(f"{self._stage}: {name}: {tables.brief(entry)}", flush=True)

    def _died(self, process: "subprocess.Popen[str]", began: tuple[str, dict[str, Any]] | None) -> bool:
        """Handle a process that ended by itself, or at its time limit; between points nothing can continue."""
        status = process.wait()
        if began is None:
            print(f"{self._stage}: ended with status {status}; the log ends: {_last_line(self._log)}", flush=True)
            return False
        name, entry = began
        is_late = time.time() >= self._deadline + GRACE_S
        why = f"still ran {GRACE_S} s after the time was up" if is_late else f"the process ended with status {status}"
        self._put(name, {**entry, "failed": why})
        return True


def _environment(dry_run: bool) -> dict[str, str]:
    """Return an environment with the project's folders, installed or not; for a dry run, without accelerators."""
    folders = [str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    if not dry_run:
        return env
    # Measured values do not count here: fast compilation does.
    return {**env, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def _last_line(log: TextIO) -> str:
    lines = Path(log.name).read_text(errors="replace").splitlines()
    return lines[-1] if lines else ""


def _kill(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def run(device: str, parts: Parts, doc: str | None) -> None:
    """Measure the parts named on the command line, and print the tables.

    Args:
        device: "gpu" or "tpu".
        parts: stages of each part.
        doc: --help text.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*parts, "all", "report"], default="all")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help=f"scripts/results/{device}.json, or of a dry run {device}-dry-run.json",
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots there; needs matplotlib")
    parser.add_argument("--minutes", type=float, default=8, help="for each part")
    parser.add_argument("--only", default="", metavar="TEXT", help="points whose name contains it")
    parser.add_argument("--missing", action="store_true", help="only points without figures in the file")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, to try the script itself")
    args = parser.parse_args()
    args.json = args.json or ROOT / f"scripts/results/{device}{'-dry-run' * args.dry_run}.json"
    chosen = {"all": list(parts), "report": []}.get(args.part, [args.part])
    document = Document(args.json, device, args.dry_run) if chosen else Document.read(args.json, device)
    if chosen:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        options = Options(args.dry_run, args.missing, args.only)
        with args.json.with_suffix(".log").open("a") as log:
            for part in chosen:
                measure(document, part, parts[part], args.minutes, options, log)
        document.write()
    if args.plots:
        print("\n".join(plots.draw(document, args.plots)))
    print(tables.render(document))
