"""Cost of a step beside its program, counted by events of jax's own profiler, and overlap of host and device."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.core.growing_outputs import RequestGroup
from tests.e2e.workloads import tokens

Start = Callable[..., DrivenEngine]

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
UPLOAD, DISPATCH, DOWNLOAD = (
    "DevicePut",
    "CommonPjRtLoadedExecutable::ExecuteHelperOnSingleDevice",
    "ArrayImpl.copy_to_host_async",
)


def add(engine: DrivenEngine, params: SamplingParams) -> None:
    for index in range(2):
        engine.add_request(str(index), tokens(5, f"pipeline {index}"), params)


def finish(engine: DrivenEngine) -> None:
    while engine.has_unfinished():
        engine.step()


def count_events(engine: DrivenEngine, directory: Path) -> tuple[Counter[str], int]:
    """Return profiler events by name during some steps, and how many step programs the engine asked for."""
    first = engine.replicas[0].scheduler._next_step_id
    with jax.profiler.trace(str(directory)):
        for _ in range(6):
            engine.step()
    (path,) = directory.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    counts = Counter(event.name for plane in planes for line in plane.lines for event in line.events)
    return counts, engine.replicas[0].scheduler._next_step_id - first


def test_a_step_is_one_upload_one_dispatch_and_one_small_download(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    add(engine, GREEDY)
    engine.step()
    launch, downloads = engine.replicas[0].executor.launch, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        handle = launch(*args, **kwargs)
        downloads.append(handle.output.sampled.nbytes)
        return handle

    with monkeypatch.context() as patch:
        patch.setattr(engine.replicas[0].executor, "launch", watched)
        counts, num_programs = count_events(engine, tmp_path)
    assert num_programs == len(downloads) > 0
    assert {name: counts[name] for name in (UPLOAD, DISPATCH, DOWNLOAD)} == dict.fromkeys(
        (UPLOAD, DISPATCH, DOWNLOAD), num_programs
    )
    assert max(downloads) <= 2 * 4 * engine.schedule.max_num_seqs, "a count and a token id of each row"
    finish(engine)


def test_requested_logprobs_are_downloaded_with_the_tokens(start: Start, tmp_path: Path) -> None:
    """The counts above would include one more download."""
    engine = start()
    add(engine, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1))
    engine.step()
    counts, num_programs = count_events(engine, tmp_path)
    assert counts[UPLOAD] == counts[DISPATCH] == num_programs
    assert counts[DOWNLOAD] > num_programs
    finish(engine)


@pytest.mark.parametrize("step_ahead", [True, False])
def test_tokens_are_handled_while_the_device_runs_the_next_step(
    start: Start, monkeypatch: pytest.MonkeyPatch, step_ahead: bool
) -> None:
    engine = start(step_ahead=step_ahead)
    append, ahead = RequestGroup.append, []

    def watched(*args: Any, **kwargs: Any) -> str | None:
        ahead.append(
            engine.replicas[0].scheduler._next_step_id - 1 - engine.replicas[0].scheduler._last_updated_step_id
        )
        return append(*args, **kwargs)

    monkeypatch.setattr(RequestGroup, "append", watched)
    add(engine, GREEDY)
    for _ in range(8):
        engine.step()
    assert len(ahead) > 8
    assert set(ahead) == {int(step_ahead)}
    finish(engine)
