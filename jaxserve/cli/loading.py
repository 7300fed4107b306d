"""Engines of the commands that load one, and their live statistics."""

import contextlib
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from jaxserve.cli.config_flags import engine_options
from jaxserve.cli.process_flags import join_processes
from jaxserve.live_stats import LiveStats

if TYPE_CHECKING:
    from jaxserve.llm import LLM


def load_llm(args: Namespace, **options: Any) -> "LLM":
    """Load the model that the flags describe, over the devices of all processes of the run."""
    from jaxserve.llm import LLM  # noqa: PLC0415 - imports jax

    join_processes(args)
    return LLM(**engine_options(args), **options)


def live_stats(wanted: bool, llm: "LLM") -> contextlib.AbstractContextManager[object]:
    """Return a context that writes a live line to stderr, if that is wanted."""
    return LiveStats(llm.engine, sys.stderr) if wanted else contextlib.nullcontext()
