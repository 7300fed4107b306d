"""Event logs: a replica's events in a JSON lines file, from which its plans can be replayed.

The first line has the schedule's sizes, and the lower tiers with their content at the start; every other line has an
event: its name and fields. Prompts are included; constraints are not, but the tokens that they append are.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, get_args

import numpy as np

from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.sparsity_config import EvictionConfig, read_budget
from jaxserve.core.events import Added, Finished, ReplicaEvent, Scheduled, replay
from jaxserve.errors import ConfigError
from jaxserve.images.prepared import ImageSpan, PreparedImage
from jaxserve.scheduling.kv_cache.stored_pages import PageKey, StoredPages
from jaxserve.scheduling.request import LOGGED_FIELDS, FinishReason, Request
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_plan import LoadCosts, StepChoice, StepShape, Timing

logger = logging.getLogger(__name__)

MAX_BYTES = 2**30
_EVENTS = {event.__name__: event for event in get_args(ReplicaEvent)}


class LoggedRun(NamedTuple):
    """Content of a log.

    Attributes:
        schedule: sizes on which plans depend.
        tiers: lower tiers with their content at the start.
        events: the events, in order.
    """

    schedule: ScheduleConfig
    tiers: list[StoredPages]
    events: Iterator[ReplicaEvent]


class EventLog:
    """A file of events; once full, it stays as it is.

    Args:
        path: file to write; an existing one is replaced.
        schedule: sizes on which plans depend.
        tiers: lower tiers, before the first event.
        max_bytes: maximum file size.

    Raises:
        ConfigError: the file cannot be opened for writing.
    """

    def __init__(
        self, path: str | Path, schedule: ScheduleConfig, tiers: Sequence[StoredPages] = (), max_bytes: int = MAX_BYTES
    ) -> None:
        try:
            self._file: IO[str] | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - as long as the engine
        except OSError as error:
            raise ConfigError(f"event_log must be a file that can be written, got {path}: {error}") from error
        self._path, self._left = path, max_bytes
        self._write(dataclasses.asdict(schedule) | {"tiers": [_tier_to_json(tier) for tier in tiers]})

    def record(self, event: ReplicaEvent) -> None:
        """Append an event, unless the file is full or could not be written."""
        self._write(event_to_json(event))

    def close(self) -> None:
        """Flush and close the file; nothing is recorded any more."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _write(self, content: Any) -> None:
        """Append `content` as a line of JSON; end the log if the file is full or cannot be written."""
        if self._file is None:
            return
        line = json.dumps(content, separators=(",", ":")) + "\n"
        self._left -= len(line)
        if self._left < 0:
            logger.warning("the event log %s is full: nothing more is recorded", self._path)
            self.close()
            return
        try:
            self._file.write(line)
        except OSError as error:  # a full disk must not stop serving
            logger.warning("the event log %s ends here: %s", self._path, error)
            self._file = None


def read_log(path: str | Path) -> LoggedRun:
    """Return the content of a log, without an incomplete last line."""
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    sizes = json.loads(lines[0])
    tiers = [_read_tier(*tier) for tier in sizes.pop("tiers", ())]  # an older log has none
    for name in ("windows", "tenant_weights", "targets"):
        sizes[name] = tuple(tuple(each) if isinstance(each, list) else each for each in sizes[name])
    for name in ("encoder_costs", "score_costs"):  # an older log has none
        sizes[name] = tuple(map(tuple, sizes.get(name, ())))
    sizes["eviction"] = read_budget(EvictionConfig, sizes.get("eviction"))
    events = (event_from_json(json.loads(line)) for line in lines[1:] if line.endswith("\n"))
    return LoggedRun(ScheduleConfig(**sizes), tiers, events)


def replay_log(path: str | Path) -> int:
    """Replay the plans of a log, and return their number; RuntimeError if one differs."""
    schedule, tiers, events = read_log(path)
    return replay(events, Scheduler(schedule, tiers=tiers))


def event_to_json(event: ReplicaEvent) -> list[Any]:
    """Return an event as its name and fields, in types that JSON has."""
    return [type(event).__name__, *map(_field_to_json, event)]


def event_from_json(content: list[Any]) -> ReplicaEvent:
    """Return the event that `event_to_json` has written, in this version or an older one."""
    match content:
        case ["Added", request]:
            return Added(_read_request(request))
        case ["Finished", request_id, reason]:
            return Finished(request_id, FinishReason(reason))
        case ["Scheduled", *fields]:
            return _read_scheduled(*fields)
    return _EVENTS[content[0]](*content[1:])


def _tier_to_json(tier: StoredPages) -> list[Any]:
    """Return a tier's properties and content, in types that JSON has."""
    keys = [[group, content.hex()] for group, content in tier.keys]
    return [tier.name, tier.num_pages, tier.outlives_device, keys, tier.state_pages, tier.is_read_only]


def _read_tier(
    name: str,
    num_pages: int,
    outlives_device: bool,
    keys: list[list[Any]],
    state_pages: int = 1,
    is_read_only: bool = False,
) -> StoredPages:
    """Return the tier that `_tier_to_json` has written."""
    found = [PageKey(group, bytes.fromhex(content)) for group, content in keys]
    return StoredPages(
        name,
        num_pages,
        found,
        outlives_device=outlives_device,
        state_pages=state_pages,
        is_read_only=is_read_only,
    )


def _field_to_json(field: Any) -> Any:
    """Return an event's field as it is, or a request as a dict of its logged fields."""
    if not isinstance(field, Request):
        return field
    content = {name: getattr(field, name) for name in LOGGED_FIELDS}
    content |= {"params": dataclasses.asdict(field.params), "stop_ids": sorted(field.stop_ids)}
    content["axes"] = None if field.axes is None else field.axes.tolist()
    return content | {"images": list(map(_image_to_json, field.images)), "salt": field.salt.hex()}


def _image_to_json(span: ImageSpan) -> list[Any]:
    """Return what plans read of an image, in types that JSON has: of its patches only the number."""
    image = span.image
    return [image.digest.hex(), *image.grid, span.start, span.tokens.tolist(), len(image.patches)]


def _read_image(digest: str, rows: int, columns: int, start: int, tokens: list[int], num_patches: int = 0) -> ImageSpan:
    """Return the image that `_image_to_json` has written, with empty patches."""
    patches = np.zeros((num_patches, 0), np.float32)
    image = PreparedImage(bytes.fromhex(digest), patches, (rows, columns), len(tokens))
    return ImageSpan(image, start, np.array(tokens, np.int32))


def _read_scheduled(choice: Any, program: Any, digest: int, *others: Any) -> Scheduled:
    """Return a `Scheduled` event from its logged fields, in any version's layout."""
    if isinstance(choice, int):  # an older log has the choice's fields side by side
        choice = [choice, *others]
    read = StepChoice(*choice)
    if isinstance(program, int):  # an even older log has only the program's tokens
        program = [program]
    timing = Timing(*read.timing) if read.timing else None
    choice = read._replace(timing=timing, loads=LoadCosts(*read.loads) if read.loads else None)
    return Scheduled(choice, None if program is None else StepShape(*program), digest)


def _read_request(content: dict[str, Any]) -> Request:
    """Return a request from a dict of its logged fields."""
    params = content.pop("params")
    if params["logit_bias"]:
        params["logit_bias"] = {int(token_id): bias for token_id, bias in params["logit_bias"].items()}
    if content.get("reuse") is not None:
        content["reuse"] = ReuseHint(*content["reuse"])
    content["bad_sequences"] = tuple(map(tuple, content["bad_sequences"]))
    content["images"] = tuple(_read_image(*image) for image in content.get("images", ()))
    if content.get("axes") is not None:
        content["axes"] = np.array(content["axes"], np.int32)
    content |= {"stop_ids": frozenset(content["stop_ids"]), "salt": bytes.fromhex(content["salt"])}
    return Request(params=SamplingParams(**params), **content)


if __name__ == "__main__":
    for file in sys.argv[1:]:
        print(f"{file}: {replay_log(file)} plans are the same")
