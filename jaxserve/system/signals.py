"""Interrupts on the command line: each ends the process at any time, with one line and exit code 130.

An exception is not sufficient: garbage collector callbacks swallow it, imports turn it into two tracebacks, and XLA's
threads crash during interpreter shutdown. The process therefore ends immediately, which is safe for everything that
survives `kill -9`, such as a batch. The interrupt is raised as an exception only within `unwinding`.

This module imports almost nothing, so that the handler is installed before any slow import.
"""

import _thread
import atexit
import os
import select
import signal
import sys
import time
from types import FrameType, TracebackType

EXIT_CODE = 130
STUCK_S = 1.0  # time after which a thread ends the process if the main thread has not handled the interrupt
UNWINDING_S = 20.0  # the same while the main thread unwinds
AGAIN_S = 1.0  # time after which a second interrupt ends the process immediately

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


class _Interrupts:
    """Interrupt state of this process.

    Attributes:
        hint: text after the line that an interrupt prints.
        num_scopes: number of `unwinding` contexts entered.
        is_raised: True after a KeyboardInterrupt was raised.
        is_ending: True after an interrupt that ends the process.
        is_notified: True after the line was printed.
        num_repeats: bytes in the wakeup pipe that do not come from the user.
    """

    def __init__(self) -> None:
        self.hint = ""
        self.num_scopes = 0
        self.is_raised = False
        self.is_ending = False
        self.is_notified = False
        self.num_repeats = 0


_state = _Interrupts()


def install() -> None:
    """Install the handler, unless interrupts are ignored, as in background jobs of a shell."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    signal.signal(signal.SIGINT, _on_interrupt)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    sys.unraisablehook = _on_swallowed
    _thread.start_new_thread(_watch, (read,))


def set_hint(hint: str) -> None:
    """Set a hint to append to the line that an interrupt prints."""
    _state.hint = hint


class unwinding:  # noqa: N801 - used as a function; importing contextlib would take longer than the rest
    """Context in which an interrupt is raised once as a KeyboardInterrupt, for work that needs cleaning up."""

    def __enter__(self) -> None:
        _state.num_scopes += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _state.num_scopes -= 1


def notify() -> None:
    """Print the line of an interrupt."""
    _state.is_notified = True
    print(_line(), file=sys.stderr, flush=True)


def leave() -> "NoReturn":
    """End the process after `notify`. Python's own shutdown would stop threads inside XLA, which then aborts."""
    if _state.is_raised:
        atexit._run_exitfuncs()  # notify other processes, which may be waiting
    os._exit(EXIT_CODE)


def _line() -> str:
    """Return the line that an interrupt prints."""
    return f"\njaxserve: interrupted{_state.hint}"


def _end_now() -> "NoReturn":
    """Print the line of an interrupt, unless that has happened, and end the process."""
    if not _state.is_notified:
        _state.is_notified = True
        os.write(2, f"{_line()}\n".encode())
    os._exit(EXIT_CODE)


def _on_interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Handle SIGINT: end the process, or within `unwinding` raise KeyboardInterrupt once."""
    if not _state.num_scopes and not _state.is_raised:
        if not _state.is_ending:  # a second interrupt before the line is printed leaves the end to the first
            _state.is_ending = True
            _end_now()
        return
    if not _state.is_raised:
        _state.is_raised = True
        raise KeyboardInterrupt


def _on_swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
    """Handle an error in a destructor or callback: resend an interrupt that was swallowed there."""
    if unraisable.exc_type is not KeyboardInterrupt or not _state.is_raised:
        sys.__unraisablehook__(unraisable)
        return
    _state.is_raised = False
    _thread.start_new_thread(_repeat, ())


def _repeat() -> None:
    """Interrupt the main thread again, after a short time."""
    time.sleep(0.01)  # give the destructor time to end
    _state.num_repeats += 1
    _thread.interrupt_main()


def _watch(pipe: int) -> None:
    """Read signals from the wakeup `pipe`; end the process if the main thread does not do so in time after SIGINT.

    It may be in a long call into a library.
    """
    first_s = deadline_s = 0.0
    while True:
        if not select.select([pipe], [], [], max(0.0, deadline_s - time.monotonic()) if first_s else None)[0]:
            _end_now()
        for number in os.read(pipe, 64):
            if number != signal.SIGINT:
                continue
            if _state.num_repeats:
                _state.num_repeats -= 1
            elif not first_s:
                first_s = time.monotonic()
                deadline_s = first_s + (UNWINDING_S if _state.num_scopes else STUCK_S)
            elif time.monotonic() > first_s + AGAIN_S:
                _end_now()
