"""Engines for the commands, and their live statistics."""

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
    """Load the model that the flags describe, over the devices of all processes."""
    given = engine_options(args)
    require_model(given)
    from jaxserve.offline.llm import LLM  # noqa: PLC0415 - imports jax

    join_processes(args)
    return LLM(**given)


def load_driven(args: Namespace) -> "DrivenEngine":
    """Load the model that the flags describe, without its tokenizer, for a caller that drives the steps."""
    given = engine_options(args)
    require_model(given)
    from jaxserve.assembly.driven import DrivenEngine  # noqa: PLC0415 - imports jax
    from jaxserve.offline.llm import LLM  # noqa: PLC0415 - imports jax

    join_processes(args)
    engine = DrivenEngine(EngineConfig(**given, skip_tokenizer_init=True))
    LLM.over(engine)  # the other processes follow the first one here, and then end
    return engine


def require_model(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if the model or tokenizer in engine options is a path that does not exist.

    This comes early, since to read them imports jax.
    """
    for name in ("model", "tokenizer"):
        path = options.get(name)
        if path is not None and not os.path.exists(path):
            raise ConfigError(
                f"the {name} must be a local directory or a .gguf file, got {path} (absent); download one from "
                "the Hugging Face Hub with `hf download NAME --local-dir DIRECTORY`"
            )


def status_line(wanted: bool, llm: "LLM") -> contextlib.AbstractContextManager[object]:
    """Return a context that shows live statistics on stderr if `wanted`."""
    return StatusLine(llm.engine, sys.stderr) if wanted else contextlib.nullcontext()
