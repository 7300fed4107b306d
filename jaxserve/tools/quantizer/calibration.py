"""Calibration sequences: token ids from a file, or from Python's standard library as text."""

import json
import logging
import sysconfig
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import ConfigError, RequestError
from jaxserve.text.loading import load_tokenizer

logger = logging.getLogger(__name__)

Document = str | list[int]

_ADVICE = "write one JSON object per line, with a `text` or a list `token_ids`, or plain text"


def calibration_sequences(
    model: Path, file: str | None, *, num_sequences: int, sequence_len: int, vocab_size: int
) -> NDArray[np.int32]:
    """Return token ids [sequences, tokens]: the documents concatenated and cut into pieces of the same length.

    Args:
        model: the tokenizer's directory, which is not read if the file has token ids.
        file: path to plain text or JSON lines; None for Python's standard library.
        num_sequences: maximum number of sequences; later documents are not read.
        sequence_len: tokens per sequence; a shorter text makes one shorter sequence.
        vocab_size: upper limit of token ids.

    Raises:
        ConfigError: the file or the tokenizer cannot be read, or has no tokens.
    """
    wanted = num_sequences * sequence_len
    documents = _standard_library() if file is None else _documents(Path(file))
    ids = np.fromiter(islice(chain.from_iterable(_token_ids(documents, model)), wanted), np.int64)
    if not len(ids):
        raise ConfigError(f"calibration needs at least one token, got none in {file}; {_ADVICE}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ConfigError(f"token ids for calibration must be below {vocab_size}, got {ids.min()} to {ids.max()}")
    if len(ids) < wanted:
        logger.warning("the calibration text has %d of %d tokens; more make a better checkpoint", len(ids), wanted)
    sequence_len = min(sequence_len, len(ids))
    whole = len(ids) // sequence_len * sequence_len
    return ids[:whole].astype(np.int32).reshape(-1, sequence_len)


def _token_ids(documents: Iterator[Document], model: Path) -> Iterator[list[int]]:
    """Yield each document's token ids; the tokenizer in `model` is loaded at the first text."""
    tokenizer = None
    for document in documents:
        if isinstance(document, list):
            yield document
            continue
        tokenizer = tokenizer or load_tokenizer(model)
        try:
            yield list(tokenizer.encode(document))
        except RequestError as error:
            raise ConfigError(f"calibration text: {error}") from error


def _documents(file: Path) -> Iterator[Document]:
    """Yield a calibration file's documents: one per line of a .jsonl or .json file, else the text as a whole."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the calibration file must be readable UTF-8, but: {error}; {_ADVICE}") from error
    if not text.strip():  # a tokenizer makes tokens even from an empty text
        raise ConfigError(f"the calibration file must have text, but {file} has none; {_ADVICE}")
    if file.suffix not in (".jsonl", ".json"):
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _document(line, f"{file}, line {number}")


def _document(line: str, where: str) -> Document:
    """Return the `text` or `token_ids` in a JSON line; ConfigError names its place, `where`, if it has neither."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} must be JSON, but: {error}; {_ADVICE}") from error
    found = record if isinstance(record, dict) else {}
    if isinstance(text := found.get("text"), str):
        return text
    ids = found.get("token_ids")
    if isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        return ids
    raise ConfigError(f"{where} must have a `text` or `token_ids`, got {line[:60]!r}; {_ADVICE}")


def _standard_library() -> Iterator[str]:
    """Yield modules from the standard library in an order that makes any number of them varied."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if skipped.isdisjoint(path.relative_to(root).parts))
    for file in chain.from_iterable(files[start::16] for start in range(16)):
        yield file.read_text(encoding="utf-8", errors="replace")
