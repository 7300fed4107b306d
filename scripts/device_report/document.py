"""The results file: every measured point, from all runs and parts; complete at any moment."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from device_report.grid import WIDE

Entry = dict[str, Any]

UNMEASURED = ("failed", "unavailable")


class Document:
    """A JSON object: parts with stages, each with its machine and points by name.

    Attributes:
        device: "gpu" or "tpu".
    """

    def __init__(self, path: Path, device: str, dry_run: bool) -> None:
        self._path, self.device = path, device
        expected: Entry = {"format": f"jaxserve-{device}-report-2", "dry_run": dry_run}
        self._content: Entry = {**expected, "parts": {}}
        if path.exists():
            self._content = json.loads(path.read_text())
            if any(self._content.get(key) != value for key, value in expected.items()):
                what = f"of a {'dry run' if dry_run else device.upper()} in the format {expected['format']}"
                raise SystemExit(f"{path} must hold a report {what}; name another with --json")

    @classmethod
    def read(cls, path: Path, device: str) -> "Document":
        """Read the existing report."""
        if not path.exists():
            raise SystemExit(f"{path} must be there to be reported; measure a part first, or name another with --json")
        return cls(path, device, bool(json.loads(path.read_text()).get("dry_run")))

    @property
    def dry_run(self) -> bool:
        """True if nothing in it was measured on the device."""
        return bool(self._content["dry_run"])

    def begin(self, part: str, stage: str, machine: Entry) -> None:
        """Set a stage's machine; measurements from another machine or other versions are dropped."""
        stages = self._content["parts"].setdefault(part, {})
        if stages.get(stage, {}).get("machine") != machine:
            stages[stage] = {"machine": machine, "points": {}}
        stages[stage]["left_out"] = []

    def put(self, part: str, stage: str, name: str, entry: Entry) -> None:
        """Add or replace a point, and write the file."""
        entry = {**entry, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        self._content["parts"][part][stage]["points"][name] = entry
        self.write()

    def leave_out(self, part: str, stage: str, name: str) -> None:
        """Note that there was no time for a point, unless an earlier run had it."""
        here = self._content["parts"][part][stage]
        if name not in here["points"] and name not in here["left_out"]:
            here["left_out"].append(name)
            self.write()

    def measured(self, part: str, stage: str) -> list[str]:
        """List the points with figures."""
        points = self._content["parts"].get(part, {}).get(stage, {}).get("points", {})
        return [name for name, entry in points.items() if not any(key in entry for key in UNMEASURED)]

    def stages(self) -> Iterator[tuple[str, str, Entry]]:
        """Yield each stage with its part and content."""
        for part, stages in self._content["parts"].items():
            for stage, content in stages.items():
                yield part, stage, content

    def points(self, *kinds: str, stage: str | None = None) -> list[Entry]:
        """Return points with these kinds that have figures, in first-measured order."""
        return [
            entry
            for _, name, content in self.stages()
            for entry in content["points"].values()
            if entry["kind"] in kinds and stage in (None, name) and not any(key in entry for key in UNMEASURED)
        ]

    def write(self) -> None:
        """Replace the file atomically: a kill leaves the previous one."""
        self._add_fractions()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        own = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        own.write_text(json.dumps(self._content, indent=1))
        own.replace(self._path)

    def peak(self, kinds: Sequence[str], unit: str) -> float | None:
        """Return the best measurement among these kinds."""
        return max((point[unit] for point in self.points(*kinds)), default=None)

    @property
    def copy_gb_per_s(self) -> float | None:
        """Peak bandwidth: copying, or adding in place."""
        return self.peak(("copy", "add"), "gb_per_s")

    @property
    def gemm_tflop_per_s(self) -> float | None:
        """Peak arithmetic rate."""
        return self.peak(("gemm",), "tflop_per_s")

    def _add_fractions(self) -> None:
        """Add the fractions of peak rates that a point reaches, if both are known."""
        copy, gemm = self.copy_gb_per_s, self.gemm_tflop_per_s
        for point in self.points("decode", "sdpa decode", "flex decode") if copy else ():
            point["fraction_of_copy"] = point["kv_gb_per_s"] / copy
        wide_us = {_sizes(point): point["us"] for point in self.points("decode") if point["kv_dtype"] == WIDE}
        for point in self.points("decode"):
            if point["kv_dtype"] != WIDE and _sizes(point) in wide_us:
                point["speed_up"] = wide_us[_sizes(point)] / point["us"]
        for point in self.points("prefill", "sdpa prefill") if gemm else ():
            point["fraction_of_gemm"] = point["tflop_per_s"] / gemm
        for point in self.points("mixed") if copy and gemm else ():
            point["fraction_of_roofline"] = max(point["kv_gb_per_s"] / copy, point["tflop_per_s"] / gemm)
        for point in self.points("serve") if copy else ():
            least_ms = (point["weight_bytes"] + point["kv_bytes"]) / copy / 1e6
            point["fraction_of_bandwidth_roofline"] = least_ms / point["step_ms"]


def _sizes(point: Entry) -> tuple[Any, ...]:
    """Return the sizes for a decode measurement with a backend, whatever its pool holds."""
    return tuple(point[name] for name in ("rows", "context", "page_size", "group", "backend"))
