"""Engines of the commands that load one, and their live statistics."""

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxserve.api.config import EngineConfig
from jaxserve.cli.config_flags import engine_options
from jaxserve.cli.process_flags import join_processes
from jaxserve.core.status_line import StatusLine
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.assembly.driven import DrivenEngine
    from jaxserve.offline.llm import LLM


def load_llm(args: Namespace) -> "LLM":
    """Load the model that the flags describe, over the devices of all processes of the run."""
    given = engine_options(args)
    require_model(given)
    from jaxserve.offline.llm import LLM  # noqa: PLC0415 - imports jax

    join_processes(args)
    return LLM(**given)


def load_driven(args: Namespace) -> "DrivenEngine":
    """Load the model that the flags describe, without its tokenizer, for a caller who makes the steps."""
    given = engine_options(args)
    require_model(given)
    from jaxserve.assembly.driven import DrivenEngine  # noqa: PLC0415 - imports jax
    from jaxserve.offline.llm import LLM  # noqa: PLC0415 - imports jax

    join_processes(args)
    engine = DrivenEngine(EngineConfig(**given, skip_tokenizer_init=True))
    LLM.over(engine)  # all processes but the first follow it here, and end
    return engine


def require_model(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if there is nothing at the path of the model, without the import of jax that reading takes."""
    for name in ("model", "tokenizer"):
        path = options.get(name)
        if path is not None and not os.path.exists(path):
            raise ConfigError(
                f"the {name} must be a local directory or a .gguf file, got {path} (absent); fetch a model of the "
                "Hugging Face hub with `hf download NAME --local-dir DIRECTORY`"
            )


def live_stats(wanted: bool, llm: "LLM") -> contextlib.AbstractContextManager[object]:
    """Return a context that writes a live line to stderr, if that is wanted."""
    return StatusLine(llm.engine, sys.stderr) if wanted else contextlib.nullcontext()
