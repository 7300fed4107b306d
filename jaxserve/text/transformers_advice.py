"""Import of transformers without its advice to install torch, which tokenizers and configs do not need."""

import contextlib
import logging
from collections.abc import Iterator

_ADVICE = "PyTorch was not found"


@contextlib.contextmanager
def without_torch_advice() -> Iterator[None]:
    """Suppress, inside the context, the line that transformers logs on import without torch; other warnings remain."""
    logger = logging.getLogger("transformers")

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_ADVICE)

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
