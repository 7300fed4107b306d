"""Write the logits by which the suite checks the main model families if torch is not installed.

    python -m tests.golden_logits          # needs torch; writes tests/models/golden_logits.npz
    python -m tests.golden_logits --check  # exits with 1 if the file is not what transformers computes

Checkpoints are random ones that are written without torch (`write_plain_checkpoint`); transformers reads and runs them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import transformers
from numpy.typing import NDArray

from tests.checkpoints import MIXTURES, VARIED, reference_logits, write_plain_checkpoint

GOLDEN = Path(__file__).parent / "models/golden_logits.npz"
FAMILIES = (*VARIED, "mistral", "qwen3", "granite", "phi3")
NUM_TOKENS = 24  # past every window, and past the original context of stretched ropes
TOLERANCE = 1e-5  # rounding of the same computation on another machine


def token_ids(vocab_size: int) -> NDArray[np.int32]:
    """Return the tokens of the sequence."""
    return np.random.default_rng(0).integers(0, vocab_size, NUM_TOKENS).astype(np.int32)


def expected_logits(family: str) -> NDArray[np.float32]:
    """Return the logits [T, V] of transformers."""
    with tempfile.TemporaryDirectory() as directory:
        write_plain_checkpoint(Path(directory), family)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype="float32", output_loading_info=True
        )
    if missing := set(info["missing_keys"]) | set(info["unexpected_keys"]):
        raise ValueError(f"the checkpoint of {family} must have the tensors of transformers; others: {sorted(missing)}")
    if family in MIXTURES:
        model.set_experts_implementation("eager")  # torch's grouped product takes no odd sizes
    return reference_logits(model.eval(), token_ids(model.config.vocab_size))


def stale(families: tuple[str, ...] = FAMILIES) -> list[str]:
    """Return the families whose logits on file are not those of transformers."""
    with np.load(GOLDEN) as golden:
        return [name for name in families if not np.allclose(golden[name], expected_logits(name), 0, TOLERANCE)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the file, and write nothing")
    if parser.parse_args().check:
        found = stale()
        print(f"stale: {', '.join(found)}" if found else f"{GOLDEN} is current")
        return len(found) > 0
    np.savez_compressed(GOLDEN, **{name: expected_logits(name) for name in FAMILIES})
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes, {len(FAMILIES)} families")
    return 0


if __name__ == "__main__":
    sys.exit(main())
