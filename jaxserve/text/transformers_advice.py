"""Import of transformers without its advice to install torch, which tokenizers and configs do not need."""

import contextlib
import logging
from collections.abc import Iterator

_ADVICE = "PyTorch was not found"


@contextlib.contextmanager
def without_torch_advice() -> Iterator[None]:
    """Drop the line that transformers logs on import if torch is not installed; all other warnings remain."""
    logger = logging.getLogger("transformers")
    logger.addFilter(_is_no_advice)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_ADVICE)
