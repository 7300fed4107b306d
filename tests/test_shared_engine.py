"""An interrupt at any line of a call on a shared engine: others are served, and no request is left behind."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from jaxserve import fair_lock, shared_engine
from jaxserve.request import CompletionOutput, RequestOutput, SamplingParams
from jaxserve.shared_engine import Call, SharedEngine

FILES = {fair_lock.__file__, shared_engine.__file__}
PARAMS = SamplingParams(max_tokens=3)


class CountingEngine:
    """Requests that end with their third step."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.outputs: dict[str, RequestOutput] = {}

    def add_request(self, request_id: str, prompt: str, params: SamplingParams) -> RequestOutput:
        self.steps[request_id] = params.max_tokens
        self.outputs[request_id] = RequestOutput(request_id, prompt, [1], [CompletionOutput(0)])
        return self.outputs[request_id]

    def abort(self, request_id: str) -> None:
        self.steps.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self.steps)

    def step(self) -> list[RequestOutput]:
        for request_id in list(self.steps):
            self.steps[request_id] -= 1
            self.outputs[request_id].finished = not self.steps[request_id]
        outputs = [self.outputs[request_id] for request_id in self.steps]
        self.steps = {request_id: left for request_id, left in self.steps.items() if left}
        return outputs


class Interrupter:
    """Raises KeyboardInterrupt at one line of FILES, counted from the start of `call`."""

    def __init__(self, line: int | None) -> None:
        self.line, self.num_lines = line, 0
        self.error: KeyboardInterrupt | None = None  # with the frames that it came through, as a debugger keeps it

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines - 1 == self.line:
                raise KeyboardInterrupt
        return self._trace

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        sys.settrace(self._trace)
        try:
            return function(*args)
        except KeyboardInterrupt as error:
            self.error = error
            return None
        finally:
            sys.settrace(None)


def serve(shared: SharedEngine) -> None:
    call, _ = shared.add(["other"], [PARAMS])
    try:
        while call.unfinished:
            shared.step(call)
    finally:
        shared.discard(call)


def add(shared: SharedEngine, interrupter: Interrupter) -> None:
    if (added := interrupter.call(shared.add, ["a", "b"], [PARAMS] * 2)) is not None:
        shared.discard(added[0])


def step(shared: SharedEngine, interrupter: Interrupter) -> None:
    call, _ = shared.add(["a", "b"], [PARAMS] * 2)
    interrupter.call(shared.step, call)
    shared.discard(call)


def last_step(shared: SharedEngine, interrupter: Interrupter) -> None:
    call, _ = shared.add(["a", "b"], [PARAMS] * 2)
    while len(shared._engine.steps) and max(shared._engine.steps.values()) > 1:
        shared.step(call)
    interrupter.call(shared.step, call)
    shared.discard(call)


def discard(shared: SharedEngine, interrupter: Interrupter) -> None:
    call, _ = shared.add(["a", "b"], [PARAMS] * 2)
    interrupter.call(shared.discard, call)
    if interrupter.error is not None:
        shared.discard(call)


def discard_another(shared: SharedEngine, interrupter: Interrupter) -> None:
    """What was discarded inside a turn is aborted with the next."""
    call, _ = shared.add(["a", "b"], [PARAMS] * 2)
    with shared.turn():
        shared.discard(call)
    interrupter.call(shared.step, Call())


def hold(shared: SharedEngine, holds: threading.Event) -> None:
    """Have the engine until another thread waits for it, if one does."""
    with shared.turn():
        holds.set()
        until_s = time.monotonic() + 0.01
        while len(shared._lock._threads) < 2 and time.monotonic() < until_s:
            time.sleep(0.0005)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("action", [add, step, last_step, discard, discard_another])
def test_an_interrupt_at_any_line_stops_nobody_else(
    action: Callable[[SharedEngine, Interrupter], None], is_busy: bool
) -> None:
    line: int | None = None
    while True:
        shared, interrupter, holds = SharedEngine(CountingEngine()), Interrupter(line), threading.Event()
        pool = ThreadPoolExecutor(2)
        own = ThreadPoolExecutor(1)  # who asks again gets the lock that an interrupt has left to its thread
        holder = pool.submit(hold, shared, holds) if is_busy else None
        if holder is not None:
            holds.wait(1)
        own.submit(action, shared, interrupter).result(5)
        other = pool.submit(serve, shared)
        try:
            other.result(1)
        except TimeoutError:
            shared._lock._threads.clear()
            pytest.fail(f"the lock is lost after an interrupt at line {line}: {_place(interrupter.error)}")
        pool.shutdown()
        own.shutdown()
        assert not shared._engine.has_unfinished(), _place(interrupter.error)
        assert not shared._calls, _place(interrupter.error)
        if line is not None and interrupter.error is None:
            break
        line = 0 if line is None else line + 1
    assert line > 5


def _place(error: BaseException | None) -> list[str]:
    places, traceback = [], error.__traceback__ if error else None
    while traceback is not None:
        places.append(f"{traceback.tb_frame.f_code.co_name}:{traceback.tb_lineno}")
        traceback = traceback.tb_next
    return places
