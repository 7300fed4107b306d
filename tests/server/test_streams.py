"""Streams: whatever the client takes and when, it gets all of its outputs, in the callbacks that have news."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Sequence
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.api.stream_events import Increment
from jaxserve.server import streams
from jaxserve.server.streams import BrokenStepError, Stream, Streams


class Group(SimpleNamespace):
    """Stand-in for a request of the frontend."""

    __hash__ = object.__hash__


def new_group(name: str, num_samples: int = 1) -> Any:
    """Return a request without an engine."""
    output = RequestOutput(name, None, [1], [CompletionOutput(index) for index in range(num_samples)])
    return Group(request_id=name, output=output, error=None)


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_client_gets_everything(seed: int) -> None:
    rng = random.Random(seed)
    groups = [new_group(str(i), rng.randint(1, 3)) for i in range(rng.randint(1, 4))]
    expected = {(i, c.index): "" for i, group in enumerate(groups) for c in group.output.outputs}
    taken = dict.fromkeys(expected, "")
    left = {key: rng.randint(1, 12) for key in expected}
    is_refused = False

    def write(number: int, increments: Sequence[Increment]) -> bool:
        nonlocal is_refused
        assert not is_refused, "nothing may be sent before the client has taken the part before"
        for increment in increments:
            taken[number, increment.completion.index] += increment.text
        is_refused = rng.random() < 0.4
        return not is_refused

    async def run() -> None:
        nonlocal is_refused
        stream = Stream(groups, Lock(), is_whole=False)
        task: asyncio.Task[None] | None = None
        while any(left.values()):
            number, index = key = rng.choice([key for key, count in left.items() if count])
            output = groups[number].output
            completion, left[key] = output.outputs[index], left[key] - 1
            completion.token_ids.append(1)
            completion.text += (piece := rng.choice(["", "a", "bc"]))
            expected[key] += piece
            if not left[key]:
                completion.finish_reason = "length"
                output.finished = all(each.finished() for each in output.outputs)
            stream.notify(groups[number])
            if task is None and rng.random() < 0.3:
                task = asyncio.ensure_future(stream.run(write))
                await asyncio.sleep(0)
            if task is not None and not is_refused:
                assert taken == expected, "news is sent at once"
            if is_refused and rng.random() < 0.3:
                is_refused = False
                stream.resume()
        task = task or asyncio.ensure_future(stream.run(write))
        await asyncio.sleep(0)
        while not task.done():
            is_refused = False
            stream.resume()
            await asyncio.sleep(0)
        task.result()

    asyncio.run(run())
    assert taken == expected


def test_an_end_and_errors_reach_who_waits() -> None:
    async def run() -> None:
        ended = Stream([new_group("a")], Lock(), is_whole=True)
        ended.end()
        await asyncio.wait_for(ended.run(), 5)
        assert ended.is_cancelled

        group = new_group("b")
        group.error = ValueError("the device is lost")
        broken = Stream([group], Lock(), is_whole=True)
        broken.notify(group)
        with pytest.raises(BrokenStepError, match="the device is lost"):
            await asyncio.wait_for(broken.run(), 5)

        def write(number: int, increments: Sequence[Increment]) -> bool:
            raise ZeroDivisionError

        group = new_group("c")
        group.output.outputs[0].token_ids.append(1)
        failing = Stream([group], Lock(), is_whole=False)
        failing.notify(group)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(failing.run(write), 5)

    asyncio.run(run())


def test_parts_of_many_streams_go_together_where_writing_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """First parts and ends are written at once, what comes between a few times, and nothing is lost."""
    now_s, listeners, num_writes = [100.0], [], 0
    threads = SimpleNamespace(submit=lambda _, listener: listeners.append(listener))
    monkeypatch.setattr(streams, "EngineThreads", lambda _: threads)
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    engine = SimpleNamespace(frontend=SimpleNamespace(cancel=lambda _: None))
    groups, taken = [new_group(str(index)) for index in range(8)], ["" for _ in range(8)]

    def grow(*, is_last: bool = False) -> None:
        for group in groups:
            completion = group.output.outputs[0]
            completion.token_ids.append(1)
            completion.text += "a"
            if is_last:
                completion.finish_reason, group.output.finished = "length", True
            listeners[0](group)

    def serve(index: int, opened: Stream) -> Any:
        def write(_: int, increments: Sequence[Increment]) -> bool:
            nonlocal num_writes
            num_writes += 1
            now_s[0] += 1e-3
            taken[index] += "".join(increment.text for increment in increments)
            return True

        return opened.run(write)

    async def run() -> None:
        served = Streams(cast(Any, engine), cast(Any, SimpleNamespace(note=lambda _: None)))
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(served.opened(Stream([g], Lock(), is_whole=False))) for g in groups]
            replies = [asyncio.ensure_future(serve(index, stream)) for index, stream in enumerate(opened)]
            await asyncio.sleep(0)
            grow()
            await asyncio.sleep(0)
            assert taken == ["a"] * 8
            for _ in range(50):
                grow()
                await asyncio.sleep(0)
            assert num_writes == 16, "tokens after the second wait"
            now_s[0] += streams.LONGEST_WAIT_S
            await asyncio.sleep(2 * streams.LONGEST_WAIT_S)
            assert (taken, num_writes) == (["a" * 51] * 8, 24)
            grow()
            await asyncio.sleep(0)
            assert num_writes == 24
            grow(is_last=True)
            await asyncio.gather(*replies)
            assert (taken, num_writes) == (["a" * 53] * 8, 32)

    asyncio.run(run())


@pytest.mark.parametrize("interval_s", [0.0, 2e-3])
def test_news_that_comes_while_the_loop_writes_is_written_too(
    monkeypatch: pytest.MonkeyPatch, interval_s: float
) -> None:
    """A thread tells of one stream in the middle of a write to another, and nothing else wakes the loop then."""
    listeners: list[Any] = []
    threads = SimpleNamespace(submit=lambda _, listener: listeners.append(listener))
    monkeypatch.setattr(streams, "EngineThreads", lambda _: threads)
    engine = SimpleNamespace(frontend=SimpleNamespace(cancel=lambda _: None))
    (first, second), lock, taken = (groups := [new_group("a"), new_group("b")]), Lock(), ["", ""]
    is_writing, is_told, written = threading.Event(), threading.Event(), [threading.Event(), threading.Event()]
    num_parts = 6

    def tell(group: Any, index: int) -> None:
        completion = group.output.outputs[0]
        with lock:
            completion.token_ids.append(1)
            completion.text += "abcdef"[index]
            if index == num_parts - 1:
                completion.finish_reason, group.output.finished = "length", True
        listeners[0](group)

    def frontend() -> bool:
        for index in range(num_parts):
            for event in (is_writing, is_told, *written):
                event.clear()
            tell(first, index)
            if not is_writing.wait(5):
                return False
            tell(second, index)
            is_told.set()
            if not all(event.wait(5) for event in written):
                return False
        return True

    def write(number: int, increments: Sequence[Increment]) -> bool:
        taken[number] += "".join(increment.text for increment in increments)
        if number == 0:
            is_writing.set()
            assert is_told.wait(5)
        written[number].set()
        return True

    async def run() -> None:
        served = Streams(cast(Any, engine), cast(Any, SimpleNamespace(note=lambda _: None)))
        served.interval_s = interval_s
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(served.opened(Stream([group], lock, is_whole=False))) for group in groups]
            runs = [
                stream.run(lambda _, new, number=number: write(number, new)) for number, stream in enumerate(opened)
            ]
            tasks = [asyncio.ensure_future(run) for run in runs]
            await asyncio.sleep(0)
            assert await asyncio.to_thread(frontend), "some news waits for other news"
            await asyncio.wait_for(asyncio.gather(*tasks), 5)

    asyncio.run(run())
    assert taken == ["abcdef"] * 2
