"""Calls of any threads on one engine, interrupts and failures among them: others are served, and nothing is left."""

import linecache
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly import engine, host
from jaxserve.core import core, core_thread, frontend, replica, stream_waker, threads
from jaxserve.core.growing_outputs import RequestGroup
from jaxserve.errors import RequestError
from jaxserve.offline import llm as llm_module
from jaxserve.offline.llm import LLM
from jaxserve.scheduling import balancer
from synthetic.null_device import TOKEN, null_engine
from tests.waiting import until

FILES = {
    module.__file__ for module in (core, core_thread, engine, frontend, host, balancer, replica, threads, llm_module)
}
PACKAGE = Path(llm_module.__file__).parents[1]
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
PATIENCE_S = 30


def new_llm(num_replicas: int = 1) -> LLM:
    sizes = {"max_model_len": 2048, "max_num_seqs": 4, "page_size": 16, "num_pages": 800}
    return LLM.over(null_engine(num_replicas, **sizes, compile_ahead="minimal"))


@pytest.fixture
def llm() -> Iterator[LLM]:
    llm = new_llm()
    yield llm
    check(llm)


def check(llm: LLM) -> None:
    """Others are served, and nothing of those before them is left."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(llm.generate, [[1, 2, 3]], PARAMS, False)
        assert future.result(PATIENCE_S)[0].outputs[0].token_ids == [TOKEN] * 5
    until_s = time.monotonic() + PATIENCE_S
    while (
        llm.engine.frontend.has_unfinished()
    ):  # a cancel that was interrupted has not happened: the request runs to its end
        assert time.monotonic() < until_s
        time.sleep(0.001)
    with llm._threads.paused() as engine:
        assert not engine.core.num_unfinished
        assert engine.occupancy.num_pages_used == 0
        engine.check_integrity()


class Interrupter:
    """Raises KeyboardInterrupt at one line of FILES that the calling thread comes to."""

    def __init__(self, line: int | None) -> None:
        self.line, self.num_lines = line, 0
        self.entered: dict[int, set[int]] = {}  # lines of `with` statements, by frame
        self.error: KeyboardInterrupt | None = None  # keeps the frames that it came through, as a debugger does

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line" and not self._is_safe(frame):
            self.num_lines += 1
            if self.num_lines - 1 == self.line:
                raise KeyboardInterrupt
        return self._trace

    def _is_safe(self, frame: FrameType) -> bool:
        """Return whether no signal is looked for at a line: CPython does so after a call and at a jump.

        So it does neither at a `try:` nor between the body of a `with` statement and its exit, for which the line of
        the statement is come to again.
        """
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if not text.startswith("with "):
            return text == "try:"
        entered = self.entered.setdefault(id(frame), set())
        is_left = frame.f_lineno in entered
        entered ^= {frame.f_lineno}
        return is_left

    def call(self, function: Callable[[Any], Any], served: LLM) -> Any:
        sys.settrace(self._trace)
        try:
            return function(served)
        except KeyboardInterrupt as error:
            self.error = error
            return None
        finally:
            sys.settrace(None)


def generate(llm: LLM) -> None:
    llm.generate([[1, 2], [3]], PARAMS, use_tqdm=False)


def stream(llm: LLM) -> None:
    for _ in llm.stream([1, 2], PARAMS):
        pass


def close_stream(llm: LLM) -> None:
    parts = llm.stream([1, 2], LONG)
    next(parts)
    parts.close()


def reset(llm: LLM) -> None:
    llm.reset_prefix_cache()


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("action", [generate, stream, pytest.param(close_stream, marks=pytest.mark.long), reset])
def test_an_interrupt_at_any_line_stops_nobody_else(action: Callable[[LLM], None]) -> None:
    llm, line, was_interrupted = new_llm(), 0, True
    while was_interrupted:
        interrupter = Interrupter(line)
        interrupter.call(action, llm)
        was_interrupted = interrupter.error is not None
        check(llm)
        line += 1
    assert line > 10


@pytest.mark.usefixtures("no_type_checks")
def test_an_interrupted_change_of_weights_keeps_the_outputs_of_requests_that_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = new_llm().engine
    monkeypatch.setattr(engine.devices, "prepare", lambda _: dict)
    for name, max_tokens in (("short", 2), ("long", 50)):
        engine.add_request(name, [1, 2], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    step, num_steps = engine.core.step, 0

    def interrupted(now_s: float) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 10:
            raise KeyboardInterrupt
        step(now_s)

    monkeypatch.setattr(engine.core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.update_weights({})
    ended = set()
    while engine.has_unfinished():
        ended |= {output.request_id for output in engine.step() if output.finished}
    assert ended == {"short", "long"}


def test_few_frames_lead_to_the_program(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames from the call to the event in the inbox, and from the core's thread to the executor, which calls it."""
    paths: dict[str, list[str]] = {}

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            frames = [each for each, _ in traceback.walk_stack(sys._getframe(1))]
            own = [each.f_code for each in frames if each.f_code.co_filename.startswith(f"{PACKAGE}/")]
            paths.setdefault(name, [code.co_name for code in own])
            return function(*args)

        return call

    engine = llm.engine
    monkeypatch.setattr(engine.frontend, "_send", watched("caller", engine.frontend._send))
    monkeypatch.setattr(engine.replicas[0].executor, "launch", watched("core", engine.replicas[0].executor.launch))
    llm.generate([[1, 2], [3]], PARAMS, use_tqdm=False)
    assert paths["caller"] == ["start", "submit", "queue", "run", "generate"]
    assert paths["core"] == ["launch", "step", "_run"], "and the launch of the executor"


def test_many_threads_are_served(llm: LLM) -> None:
    def read(index: int) -> int:
        return sum(len(part.outputs[0].token_ids) for part in llm.stream([1 + index], PARAMS))

    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(read, range(50), timeout=PATIENCE_S)) == [5] * 50


def test_a_failing_listener_ends_only_its_own_request(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: RequestGroup) -> None:
        raise ValueError("the client has gone")

    groups = [llm.engine.reader.read(name, [1, 2], LONG) for name in "ab"]
    ended = threading.Event()
    llm._threads.submit(groups[:1], fail)
    llm._threads.submit(groups[1:], lambda group: ended.set() if group.output.finished else None)
    assert ended.wait(PATIENCE_S)
    assert [group.output.outputs[0].finish_reason for group in groups] == ["abort", "length"]
    assert "its listener has failed" in caplog.text


def test_a_listener_may_submit_while_somebody_pauses(llm: LLM) -> None:
    ended: SimpleQueue[str] = SimpleQueue()
    second = llm.engine.reader.read("b", [1, 2], PARAMS)

    def submit(group: RequestGroup) -> None:
        if group.output.finished:
            until(lambda: llm._threads._is_paused)
            llm._threads.submit([second], lambda group: ended.put("b") if group.output.finished else None)
            ended.put("a")

    llm._threads.submit([llm.engine.reader.read("a", [1, 2], PARAMS)], submit)
    until_s = time.monotonic() + PATIENCE_S
    while ended.qsize() < 2 and time.monotonic() < until_s:
        llm.reset_prefix_cache()
    assert [ended.get(timeout=1) for _ in range(2)] == ["a", "b"]


def test_a_listener_may_submit_to_an_engine_that_is_stepped_in_a_pause(llm: LLM) -> None:
    ended: SimpleQueue[str] = SimpleQueue()
    second = llm.engine.reader.read("b", [1, 2], PARAMS)

    def submit(group: RequestGroup) -> None:
        if group.output.finished:
            llm._threads.submit([second], lambda group: ended.put("b") if group.output.finished else None)
            ended.put("a")

    def step() -> None:
        with llm._threads.paused() as engine:
            engine.frontend.start(llm.engine.reader.read("a", [1, 2], PARAMS), submit)
            while engine.has_unfinished():
                engine.step()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(step).result(PATIENCE_S)
    assert [ended.get(timeout=1) for _ in range(2)] == ["a", "b"]


def test_requests_end_if_no_thread_can_be_started(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    for role in ("core", "frontend"):

        def fail(thread: threading.Thread, role: str = role) -> None:
            if thread.name == f"jaxserve {role}":
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                pool.submit(llm.generate, [[1], [2]], PARAMS, False).result(PATIENCE_S)
        check(llm)


def test_a_listener_may_submit_if_no_thread_can_be_started(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    start, fails, ended = threading.Thread.start, [True, True], SimpleQueue()

    def fail(thread: threading.Thread) -> None:
        if thread.name == "jaxserve core" and fails:
            fails.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    def listener(group: RequestGroup) -> None:
        ended.put((group.error, llm._threads._lock.locked()))
        if group.error is not None:
            submit(f"{group.request_id}'")

    def submit(request_id: str) -> None:
        llm._threads.submit([llm.engine.reader.read(request_id, [1], PARAMS)], listener)

    monkeypatch.setattr(threading.Thread, "start", fail)
    submit("again")
    errors = [ended.get(timeout=PATIENCE_S) for _ in range(3)]
    assert [(error is None, is_locked) for error, is_locked in errors[:2]] == [(False, False)] * 2
    assert errors[2][0] is None
    check(llm)


def test_an_engine_that_cannot_end_its_requests_is_freed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, closed = new_llm(), []

    def broken(*_: object) -> None:
        raise RuntimeError("beyond repair")

    monkeypatch.setattr(llm.engine.core, "abort_all", broken)
    monkeypatch.setattr(llm.engine.replicas[0].executor, "close", lambda: closed.append(True))
    with pytest.raises(RuntimeError, match="beyond repair"):
        llm.close()
    assert closed


def test_threads_that_stream_are_woken_in_turn_though_no_step_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that come too early for their threads to be woken reach them with a later step, or when many are due."""
    now_s = [100.0]
    monkeypatch.setattr(stream_waker, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(stream_waker, "WAKE_S", 2**-8)  # sums of it are exact
    group = new_llm().engine.reader.read("a", [1, 2], PARAMS)
    waking, many = stream_waker.StreamWaker(), [SimpleQueue[None]() for _ in range(stream_waker.MAX_SIMULTANEOUS + 2)]
    assert waking.wake() is None, "nobody waits"
    listeners = [waking.listener(news) for news in many]
    for listener, news in zip(listeners, many, strict=True):
        listener(group)
        news.get_nowait()  # the first news come at once
        listener(group)
    for num_woken, passed_s in (
        (stream_waker.MAX_SIMULTANEOUS, 0.0),
        (stream_waker.MAX_SIMULTANEOUS + 1, stream_waker.WAKE_S),
    ):
        now_s[0] += passed_s
        left_s = waking.wake()
        assert left_s == pytest.approx(stream_waker.MAX_SIMULTANEOUS * stream_waker.WAKE_S)
        assert [news.qsize() for news in many] == [1] * num_woken + [0] * (len(many) - num_woken)
    now_s[0] += left_s
    assert waking.wake() is None
    assert [news.qsize() for news in many] == [1] * len(many)
    for listener, news in zip(listeners, many, strict=True):
        news.get()
        listener(group)
    assert waking.wake(is_last=True) is None
    assert [news.qsize() for news in many] == [1] * len(many)


def test_a_listener_must_not_wait_for_its_own_thread(llm: LLM) -> None:
    errors: SimpleQueue[Exception] = SimpleQueue()

    def reset(_: RequestGroup) -> None:
        try:
            llm.reset_prefix_cache()
        except RuntimeError as error:
            errors.put(error)

    group = llm.engine.reader.read("a", [1, 2], PARAMS)
    llm._threads.submit([group], reset)
    assert "use another one" in str(errors.get(timeout=PATIENCE_S))


@pytest.mark.parametrize("error", [SystemExit("dies"), MemoryError("dies"), KeyboardInterrupt("dies")], ids=repr)
@pytest.mark.parametrize("part", ["core.take_events", "core.step", "frontend._take_step", "core._balancer.dispatch"])
def test_a_thread_that_dies_ends_its_requests_and_the_next_are_served(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, part: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    path = part.split(".")
    owner = llm.engine
    for name in path[:-1]:
        owner = getattr(owner, name)
    method, calls = getattr(owner, path[-1]), []

    def dying(*args: Any) -> Any:
        calls.append(threading.current_thread().name)
        if len(calls) == 4:
            raise error
        return method(*args)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(owner, path[-1], dying)
        for future in [pool.submit(llm.generate, [[n]], LONG, False) for n in range(2)]:
            told = future.exception(PATIENCE_S)
            assert told is None or (isinstance(told, RuntimeError) and "dies" in str(told))
    assert all(name.startswith("jaxserve") for name in calls)
    assert len(calls) >= 4
    check(llm)
    assert "are ended" in caplog.text


@pytest.mark.parametrize("cannot_end", [False, True])
def test_a_core_that_cannot_recover_is_closed(monkeypatch: pytest.MonkeyPatch, cannot_end: bool) -> None:
    llm = new_llm()

    def broken(*_: object) -> None:
        raise RuntimeError("beyond repair")

    deliver, names = llm.engine.frontend.deliver, set()
    monkeypatch.setattr(llm.engine.frontend, "deliver", lambda: (names.add(threading.current_thread().name), deliver()))
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(llm.engine.core, "step", broken)
        patch.setattr(llm.engine.replicas[0], "recover", broken)
        if cannot_end:
            patch.setattr(llm.engine.core, "_finish", broken)
        with pytest.raises(RuntimeError, match="beyond repair"):
            pool.submit(llm.generate, [[1]], LONG, False).result(PATIENCE_S)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1]], PARAMS, use_tqdm=False)
    until(lambda: not llm._threads._thread)  # its thread must not go on for nobody
    assert names == {"jaxserve frontend"}


def test_requests_that_end_alongside_a_failing_row_are_reported(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    append, told = RequestGroup.append, SimpleQueue()

    def failing(group: RequestGroup, *args: Any) -> Any:
        if group.request_id == "fails":
            raise ValueError("no text for this token")
        return append(group, *args)

    monkeypatch.setattr(RequestGroup, "append", failing)
    groups = [llm.engine.reader.read(name, [1, 2], SamplingParams(max_tokens=1)) for name in ("ends", "fails")]
    llm._threads.submit(groups, lambda group: told.put(group.request_id) if group.output.finished else None)
    assert {told.get(timeout=PATIENCE_S) for _ in groups} == {"ends", "fails"}
    assert groups[0].error is None
    assert isinstance(groups[1].error, ValueError)


def test_requests_during_a_pause_wait_for_its_end(llm: LLM) -> None:
    with ThreadPoolExecutor(1) as pool:
        with llm._threads.paused() as engine:
            future = pool.submit(llm.generate, [[1]], PARAMS, False)
            assert not engine.frontend.has_unfinished()
        assert future.result(PATIENCE_S)[0].finished


def test_cancelling_twice_or_late_changes_nothing(llm: LLM) -> None:
    group = llm.engine.reader.read("a", [1, 2], PARAMS)
    llm._threads.submit([group], lambda _: None)
    for _ in range(3):
        llm.engine.frontend.cancel("a")
    check(llm)
    assert llm.engine.frontend.cancel("a") is None


def test_an_id_is_free_again_once_its_request_has_ended(llm: LLM) -> None:
    first, again = (llm.engine.reader.read("a", [1, 2], LONG) for _ in range(2))
    llm._threads.submit([first], lambda _: None)
    with pytest.raises(RequestError, match="unique"):
        llm._threads.submit([again], lambda _: None)
    llm.engine.frontend.cancel("a")
    check(llm)
    llm._threads.submit([again], lambda _: None)
    llm.engine.frontend.cancel("a")


def test_closing_ends_calls_that_wait() -> None:
    llm = new_llm()
    started = threading.Event()
    group = llm.engine.reader.read("a", [1, 2], LONG)
    llm._threads.submit([group], lambda _: started.set())
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(llm.generate, [[n] for n in range(20)], LONG, False)
        assert started.wait(PATIENCE_S)
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            future.result(PATIENCE_S)
