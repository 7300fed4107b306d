"""SharedEngine: one engine for the calls of several threads, each step of which serves all of them."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from jaxserve.engine.build import Weights
from jaxserve.engine.engine import Engine
from jaxserve.engine.prompt import Prompt
from jaxserve.errors import RequestError
from jaxserve.fair_lock import FairLock
from jaxserve.request import FinishReason, RequestOutput, SamplingParams


@dataclass(eq=False)
class Call:
    """The requests that one caller waits for, in whatever thread's steps they end.

    Attributes:
        unfinished: outputs by the id of the request.
        finished: outputs that the caller has not looked at yet.
        failure: what ended requests before their time, in a step of any thread.
    """

    unfinished: dict[str, RequestOutput] = field(default_factory=dict)
    finished: deque[RequestOutput] = field(default_factory=deque)
    failure: BaseException | None = None


class SharedEngine:
    """Gives an engine to one thread at a time, for a step or to add requests, in the order in which they ask.

    Args:
        engine: not used by anything else meanwhile.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = FairLock()
        self._calls: dict[str, Call] = {}  # by the id of each unfinished request
        self._discarded: deque[Call] = deque()  # whose requests the next turn aborts
        self._num_added = 0

    @contextmanager
    def turn(self) -> Iterator[Engine]:
        """Wait until the engine is this thread's alone."""
        try:
            with self._lock:
                self._abort_discarded()
                yield self._engine
        except BaseException:
            self._lock.release()  # an interrupt may have come just before
            raise

    def add(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> tuple[Call, list[RequestOutput]]:
        """Queue requests; RequestError names the prompt that cannot be served, and then none is queued."""
        call, outputs = Call(), []
        try:
            with self.turn() as engine:
                for index, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
                    request_id, self._num_added = str(self._num_added), self._num_added + 1
                    try:
                        self._calls[request_id] = call  # before the engine has it: an interrupt may come at any point
                        output = call.unfinished[request_id] = engine.add_request(request_id, prompt, p)
                    except RequestError as error:
                        raise RequestError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
                    outputs.append(output)
            return call, outputs  # here, as an interrupt may come just before
        except BaseException:
            self.discard(call)
            raise

    def step(self, call: Call) -> None:
        """Run one step for all, unless those of other threads have ended the last request of `call` meanwhile.

        Raises:
            RuntimeError: requests of this call were aborted when a step of another thread broke off.
        """
        with self.turn() as engine, self._telling_others():
            if call.unfinished and call.failure is None:
                self._hand_out(engine.step())
            if call.unfinished and not engine.has_unfinished():  # who used the engine itself has ended them
                self._hand_out(list(call.unfinished.values()))
                if call.unfinished:
                    call.failure = RuntimeError(f"the engine has lost the requests {sorted(call.unfinished)}")
        if call.failure is not None:
            raise RuntimeError(f"the step that served this request broke off: {call.failure!r}") from call.failure

    def update_weights(self, weights: Weights, *, running: str) -> None:
        """As `Engine.update_weights`; requests that end meanwhile go to their callers."""
        with self.turn() as engine, self._telling_others():
            self._hand_out(engine.update_weights(weights, running=running))

    def close(self) -> None:
        """Close the engine; calls that wait for it fail."""
        with self.turn() as engine:
            engine.close()
            self._settle(RuntimeError("the engine was closed"))

    def discard(self, call: Call) -> None:
        """Abort what is unfinished of a call. May be called from anywhere: by the garbage collector in a step, too."""
        if call not in tuple(self._calls.values()):
            return
        self._discarded.append(call)
        if not self._lock.is_wanted_here():
            with self.turn():
                pass

    def _abort_discarded(self) -> None:
        while self._discarded:
            call = self._discarded[0]
            for request_id in [own for own, its_call in self._calls.items() if its_call is call]:
                self._engine.abort(request_id)  # nothing, where the engine does not have it
                call.unfinished.pop(request_id, None)
                del self._calls[request_id]
            self._discarded.popleft()

    def _hand_out(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.finished and (call := self._calls.pop(output.request_id, None)) is not None:
                del call.unfinished[output.request_id]
                call.finished.append(output)

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._settle(error)
            raise

    def _settle(self, error: BaseException) -> None:
        """After a step that broke off: hand out what had ended before, and tell whoever lost requests by it."""
        outputs = [output for call in set(self._calls.values()) for output in call.unfinished.values()]
        ended = [output for output in outputs if output.finished]
        for output in ended:
            if any(completion.finish_reason == FinishReason.ABORT for completion in output.outputs):
                self._calls[output.request_id].failure = error
        self._hand_out(ended)
