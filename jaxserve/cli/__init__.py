"""Command line: `jaxserve serve`, `generate`, `batch`, `bench`, `convert`, `quantize`, `plan` and others.

Each command is a module with its flags and code, which imports jax only when it runs, so that `--help` and a wrong
flag need not wait for it.

Exit codes: 0 success, for a batch also if some records are errors; 1 no target in a sweep could be planned, or lines of
a batch with `--strict` have failed; 2 invalid command line or configuration, or a file that cannot be read or written,
reported in one line; 75 another process of the run was lost; 130 interrupted; 141 the output's reader closed it.
"""

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Sequence

from jaxserve.cli.config_flags import with_dashes
from jaxserve.cli.logs import log_at_level
from jaxserve.cli.parser import build_parser
from jaxserve.cli.process_flags import is_distributed
from jaxserve.distributed import peers
from jaxserve.errors import ConfigError, PeerLostError, RequestError
from jaxserve.system import signals


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code. Flags may have underscores, as in vLLM."""
    parser, given = build_parser(), with_dashes(sys.argv[1:] if argv is None else argv)
    if not given:
        parser.print_help()
        return 0
    args = parser.parse_args(given)
    signals.set_hint(args.on_interrupt)
    try:
        with log_at_level(args), _unwinding_if_others_wait(args):
            code: int = args.run(args)
        sys.stdout.flush()
        return code
    except (ConfigError, RequestError) as error:
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return 2
    except PeerLostError as error:
        print(f"jaxserve: error: {error}{args.on_interrupt}", file=sys.stderr)
        return peers.EXIT_CODE
    except KeyboardInterrupt:
        signals.notify()
        return signals.EXIT_CODE
    except BrokenPipeError:
        # the interpreter flushes stdout once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"jaxserve: error: {error}{args.on_interrupt}", file=sys.stderr)
        return 2


def _unwinding_if_others_wait(args: Namespace) -> contextlib.AbstractContextManager[None]:
    """Return a context in which an interrupt unwinds the stack, so that the run's other processes are notified.

    In a run of one process it does nothing.
    """
    wait = hasattr(args, "distributed") and is_distributed(args)
    return signals.unwinding() if wait else contextlib.nullcontext()
