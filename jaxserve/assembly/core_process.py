"""CoreProcess: the child process in which a core runs, started by a `CoreClient` and connected to it by a pipe.

Its main thread reads the pipe; the core's thread writes each step's results. It ends when the pipe closes, however the
client's process ended, and ignores signals that a terminal sends to both processes.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from jaxserve.assembly.host import CoreHost
from jaxserve.core import process_messages
from jaxserve.core.core_thread import LOOK_S, CoreThread
from jaxserve.core.deltas import Delta, Ended
from jaxserve.core.events import Cancelled, Event, Submitted
from jaxserve.core.grammars import Grammars
from jaxserve.core.process_messages import Constrained, Failed, FromCore, Logged, Reply, Start, Started
from jaxserve.core.status import CoreStatus
from jaxserve.scheduling.request import FinishReason, Request
from jaxserve.text.loading import load_tokenizer

if TYPE_CHECKING:
    from jaxserve.api.metrics import StepStats
    from jaxserve.scheduling.wait_estimate import OutputLengths, Wait

logger = logging.getLogger("jaxserve.assembly.core_process")  # it runs as __main__

# maximum time for which the core's thread may keep the interpreter lock from the pipe's reader
SWITCH_INTERVAL_S = 5e-4
WARM_LOOK_S = 0.1  # time between checks whether all programs are compiled
MAX_MAKERS = 4  # threads that create constraints
# calls for which no step must pause
_FROM_ANY_THREAD = {
    *("wait_until_warm", "peak_rates", "describe_device", "estimate"),
    *("load_adapter", "unload_adapter", "adapters_in_use"),
    *("save_pages", "kv_bytes", "shared_pages"),
}


class CoreProcess:
    """A core that serves a client in another process.

    Args:
        connection: pipe to the client.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.RLock()  # guards the pipe and its message counts
        self._pausing = threading.Lock()  # held by a call with exclusive use of the core
        self._making = threading.Lock()  # guards `_unmade`
        self._unmade: set[int] = set()  # keys of requests whose constraints are being created
        # Only a few threads, because each takes the interpreter lock from the core's thread.
        self._makers = ThreadPoolExecutor(MAX_MAKERS, "jaxserve grammars")
        self._num_sent = self._num_delivered = 0  # number of deltas
        # statistics list seen last, and the number of its entries already sent
        self._sent_steps: tuple[list[StepStats], int] = [], 0
        self._host: CoreHost
        self._driver: CoreThread
        self._grammars: Grammars

    def run(self) -> NoReturn:
        """Serve until the client is gone."""
        try:
            self._serve()
        except (EOFError, OSError):
            self._leave()
        except BaseException:  # nobody would read the pipe any more
            logger.exception("the engine's process ends: a message could not be taken")
            self._leave(1)

    def _serve(self) -> NoReturn:
        """Start the core, and take the client's messages until the pipe ends, which raises EOFError or OSError."""
        start: Start = process_messages.receive(self._connection)
        logging.getLogger().addHandler(_Sender(self))
        logging.getLogger("jaxserve").setLevel(start.log_level)
        threading.Thread(target=self._start, args=(start,), name="jaxserve start", daemon=True).start()
        while True:
            events, self._num_delivered, call = process_messages.receive(self._connection)
            for keys, data in events:
                self._take(keys, data)
            if events:
                self._driver.start()
            if call is not None:
                data = self._connection.recv_bytes()
                threading.Thread(target=self._answer, args=(call, data), daemon=True).start()

    def _start(self, start: Start) -> None:
        """Build the core on a separate thread, because the main one must notice the end of the client."""
        try:
            host = self._new_host(start)
        except BaseException as error:
            self.send(Failed(process_messages.portable_error(error)))
            return
        gc.collect()
        gc.freeze()  # a full collection would scan all of it and pause the steps
        self._host = host
        self._driver = CoreThread(host.core, host.close, self._flush, lambda: self._num_sent - self._num_delivered)
        self._flush()  # first, so that a status exists
        self.send(Started(host.schedule))
        while not host.is_warm:  # waiting for it would compile all programs, even for a short run
            time.sleep(WARM_LOOK_S)
        self._flush()

    def _new_host(self, start: Start) -> CoreHost:
        """Apply the client's jax settings, and build the core that it describes."""
        for name, value in start.settings.items():
            if jax.config.values.get(name, value) != value:  # modules loaded only in the client may add settings
                jax.config.update(name, value)
        config = start.config
        self._grammars = Grammars(
            lambda: load_tokenizer(config.tokenizer_path, config.chat_options), start.arch.vocab_size, start.eos_ids
        )
        return CoreHost(config, start.arch)

    # Events

    def _take(self, keys: list[int], data: bytes) -> None:
        """Decode an event and send it to the core; requests with structured outputs follow with their constraints.

        Args:
            keys: keys of the samples in the event.
            data: encoded event.
        """
        try:
            event: Event | Constrained = process_messages.decode(data)
        except Exception as error:  # no log: the pipe may be full both ways, and this thread must keep reading
            self._abort(keys, error)
            event = Submitted([])  # it still counts as an event
        if isinstance(event, Constrained):
            with self._making:
                self._unmade.update(keys)
            self._makers.submit(self._constrain, event.requests, event.tried_bytes)
            return
        if isinstance(event, Cancelled) and self._unmade:
            with self._making:
                self._unmade.difference_update(event.keys)
        self._host.send(event)

    def _constrain(self, requests: Sequence[Request], tried_bytes: int) -> None:
        """Create the constraints of requests, and send those that have not been cancelled meanwhile to the core."""
        left = requests
        try:
            for request in requests:
                request.constraint = self._grammars.constraint(
                    request.params, request.stop_ids, request.tenant, tried_bytes
                )
        except Exception as error:
            logger.exception("request %s is ended: its constraint could not be made again", requests[0].request_id)
            self._abort([request.key for request in requests], error)
            left = []
        with self._making:
            left = [request for request in left if request.key in self._unmade]
            self._unmade.difference_update(request.key for request in requests)
            self._host.send(Submitted(left))  # possibly empty if all were cancelled: it still counts as an event
        self._driver.start()

    def _abort(self, keys: list[int], error: Exception) -> None:
        """Report to the client that samples have ended by an error before the core received them."""
        ended = [Ended(key, FinishReason.ABORT) for key in keys]
        self._host.outbox.append(Delta(time.monotonic(), ended=ended, error=error))

    # Method calls

    def _answer(self, number: int, data: bytes) -> None:
        """Call the host's method in an encoded message, and reply to call `number` with its result or error.

        The call is between two steps unless the method allows any thread.
        """
        value: Any = None
        error: BaseException | None = None
        try:
            name, args = process_messages.decode(data)
            method = self._estimate if name == "estimate" else getattr(self._host, name)
            value = method(*args) if name in _FROM_ANY_THREAD else self._between_steps(method, args)
        except BaseException as raised:
            error = process_messages.portable_error(raised)
        self._flush(Reply(number, value, error))

    def _between_steps(self, method: Any, args: tuple[Any, ...]) -> Any:
        """Pause the core's thread, and return `method(*args)`."""
        with self._pausing:
            self._driver.pause()
            while self._driver.is_running:
                time.sleep(LOOK_S)
            try:
                return method(*args)
            finally:
                self._driver.resume()
                self._driver.start()

    def _estimate(self, num_tokens: int, priority: int | None, lengths: OutputLengths) -> Wait | None:
        """Return the wait estimate for a request, given the client's distribution of output lengths."""
        self._host.wait_estimator.lengths = lengths
        return self._host.wait_estimator.wait(num_tokens, priority)

    # To the client

    def _flush(self, reply: Reply | None = None) -> None:
        """Send new deltas, in order, with status, statistics and perhaps a reply; callable from any thread."""
        with self._sending:
            status = self._status()  # first: if it reports no work, all deltas are already in the outbox
            outbox, steps = self._host.outbox, self._host.core.last_steps
            deltas = [process_messages.pack_delta(outbox.popleft()) for _ in range(len(outbox))]
            self._num_sent += len(deltas)
            sent, count = self._sent_steps
            new = steps[count if sent is steps else 0 :]
            self._sent_steps = steps, len(steps)
            values = process_messages.stats_values(self._host.stats), list(map(process_messages.step_values, new))
            self._post(FromCore(deltas, status, *values, reply))

    def _status(self) -> CoreStatus:
        """Return the state of the core that the client can read at any time."""
        core, estimator = self._host.core, self._host.wait_estimator
        return CoreStatus(
            core.num_taken,  # first: later events are counted by the next status
            core.has_work(),
            self._host.occupancy,
            core.num_waiting_tokens,
            estimator.rates(),
            self._host.memory,
            self._host.is_warm,
        )

    def send(self, message: object) -> None:
        """Send a message; callable from any thread."""
        with self._sending:
            self._post(message)

    def _post(self, message: object) -> None:
        """Write a message to the pipe; the caller holds its lock. Ends this process if the client is gone."""
        try:
            process_messages.send(self._connection, message)
        except OSError:  # the client is gone
            self._leave()

    def _leave(self, code: int = 0) -> NoReturn:
        """End the process; Python's own shutdown would stop threads inside XLA, which then aborts."""
        try:
            if hasattr(self, "_host"):
                self._host.close_files()
            if sys.stderr is not None:  # None for a daemon that has closed it
                sys.stderr.flush()
        finally:  # nobody else would end the process
            os._exit(code)


class _Sender(logging.Handler):
    """Handler that forwards log records to the client."""

    def __init__(self, process: CoreProcess) -> None:
        super().__init__()
        self._process = process

    def emit(self, record: logging.LogRecord) -> None:
        """Send a log record, with its traceback as text."""
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        plain = {"name": record.name, "levelno": record.levelno, "levelname": record.levelname, "msg": text}
        self._process.send(Logged(plain))


def main() -> NoReturn:
    """Run a core that serves at the pipe whose file descriptor is the command line's argument."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    handle = int(sys.argv[1])
    os.set_inheritable(handle, False)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    CoreProcess(Connection(handle)).run()


if __name__ == "__main__":
    main()
