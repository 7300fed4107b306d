"""Bits per byte for the embedded checkpoint and its draft on held-out modules, compared with xz, and how often both
agree.

    python scripts/eval_bpb.py [--limit BYTES] [--quantization int8 int4] [--activation-quantization int8]
        [--kv-cache-dtypes int8 float8_e4m3fn int4]

Every module is scored separately, after <|endoftext|>, in windows that overlap by half: each token is predicted from at
least half a window of earlier text, or from all there is. xz -9e compresses all modules as one stream.
"""

import argparse
import json
import lzma
import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from tokenizers import Tokenizer

from jaxserve.api.config import KV_DTYPES, WEIGHT_FORMATS
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, step_bytes
from training import stdlib_corpus
from training.dense_model import load_model, logits, token_nats

WEIGHTS = Path(__file__).parents[1] / "weights"
_BATCH = 4


@dataclass(frozen=True)
class Scores:
    """Cost per scored token, the model's most likely id at its position, and the position in the window."""

    nats: NDArray[np.float32]
    greedy_ids: NDArray[np.int32]
    positions: NDArray[np.int32]


def windows(ids: Sequence[int], size: int) -> Iterator[tuple[list[int], int]]:
    """Yield windows with at most `size` + 1 ids that overlap by half, and the first position to score in each."""
    half = size // 2
    yield list(ids[: size + 1]), 0
    for start in range(half, len(ids) - half - 1, half):
        yield list(ids[start : start + size + 1]), half


def score(
    params: Params, arch: ArchConfig, documents: Sequence[Sequence[int]], window: int, kv_dtype: str | None = None
) -> Scores:
    """Score all ids except the first in each document, with keys and values rounded as in a `kv_dtype` pool."""
    cut = [w for ids in documents for w in windows(ids, window)]
    nats, greedy, positions = [], [], []
    for i in range(0, len(cut), _BATCH):
        group = cut[i : i + _BATCH]
        tokens = np.zeros((_BATCH, window + 1), np.int32)
        for row, (ids, _) in zip(tokens, group, strict=False):
            row[: len(ids)] = ids
        group_nats, group_greedy = jax.device_get(
            _score_batch(params, jnp.asarray(tokens), arch=arch, kv_dtype=kv_dtype)
        )
        for j, (ids, first) in enumerate(group):
            nats.append(group_nats[j, first : len(ids) - 1])
            greedy.append(group_greedy[j, first : len(ids) - 1])
            positions.append(np.arange(first, len(ids) - 1, dtype=np.int32))
    return Scores(np.concatenate(nats), np.concatenate(greedy), np.concatenate(positions))


@partial(jax.jit, static_argnames=("arch", "kv_dtype"))
def _score_batch(params: Params, tokens: Array, *, arch: ArchConfig, kv_dtype: str | None) -> tuple[Array, Array]:
    """Return the cost of each token in nats, and the most likely id at its position."""
    out = logits(params, arch, tokens[:, :-1], kv_dtype)
    return token_nats(out, tokens[:, 1:]), out.argmax(-1).astype(jnp.int32)


def bits_per_byte(scores: Scores, documents: Sequence[bytes]) -> float:
    """Return the scores' total cost in bits, per byte of the documents."""
    return float(scores.nats.sum(dtype=np.float64)) / math.log(2) / sum(map(len, documents))


def above_percent(scores: Scores, exact: Scores, first: int = 0) -> float:
    """Return the excess bits over the exact model, in percent, over tokens from window position `first` on."""
    late = exact.positions >= first
    return round(100 * (float(scores.nats[late].sum(dtype=np.float64) / exact.nats[late].sum(dtype=np.float64)) - 1), 3)


def xz_bits_per_byte(documents: Sequence[bytes]) -> float:
    data = b"".join(documents)
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


def take(documents: Sequence[bytes], limit: int | None) -> list[bytes]:
    """Return the first `limit` bytes of the documents, cut at a line end."""
    taken: list[bytes] = []
    for document in documents:
        left = math.inf if limit is None else limit - sum(map(len, taken))
        if len(document) > left:
            return [*taken, document[: document.rfind(b"\n", 0, int(left)) + 1]]
        taken.append(document)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=WEIGHTS / "default")
    parser.add_argument("--draft", type=Path, default=WEIGHTS / "default-draft")
    parser.add_argument("--limit", type=int, metavar="BYTES", help="bytes to score; all by default")
    parser.add_argument("--window", type=int, default=1024, help="tokens the model sees at once")
    parser.add_argument(
        "--quantization",
        nargs="+",
        choices=list(filter(None, WEIGHT_FORMATS)),
        default=[],
        metavar="NAME",
        help="score the model quantised as well",
    )
    text = "score the quantised models with rounded activations as well, by the native CPU kernels"
    parser.add_argument("--activation-quantization", choices=["int8"], help=text)
    parser.add_argument(
        "--kv-cache-dtypes",
        nargs="+",
        choices=[name for name in KV_DTYPES if name != "float32"],
        default=[],
        metavar="NAME",
        help="score the model with such pools as well",
    )
    args = parser.parse_args()

    documents = take(stdlib_corpus.read(held_out=True), args.limit)
    if not any(documents):
        parser.error(f"--limit must have room for the first line of the corpus, got {args.limit} bytes")
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    ids = [tokenizer.encode(stdlib_corpus.as_text(document)).ids for document in documents]
    num_bytes, num_tokens = sum(map(len, documents)), sum(map(len, ids)) - len(ids)
    versions = {"python": platform.python_version(), "jax": jax.__version__, "device": jax.devices()[0].device_kind}
    print(json.dumps({"bytes": num_bytes, "tokens": num_tokens, "window_tokens": args.window, **versions}))
    print(json.dumps({"name": "xz -9e", "bits_per_byte": round(xz_bits_per_byte(documents), 4)}))

    activations = dict.fromkeys((None, args.activation_quantization))
    quantised = [(args.model, name, inputs) for name in args.quantization for inputs in activations]
    scores = {}
    for directory, quantization, inputs in [(args.model, None, None), (args.draft, None, None), *quantised]:
        params, arch = load_model(directory, quantization=quantization, activation_quantization=inputs)
        found = scores[directory, quantization, inputs] = score(params, arch, ids, args.window)
        row = {
            "name": ", ".join(filter(None, (directory.name, quantization, inputs and f"activations in {inputs}"))),
            "params": registry.num_params(arch),
            "weight_mb": round(step_bytes(params) / 1e6, 2),
            "bits_per_byte": round(bits_per_byte(found, documents), 4),
            "above_percent": above_percent(found, scores[args.model, None, None]),
        }
        print(json.dumps(row), flush=True)
    params, arch = load_model(args.model)
    exact, last = scores[args.model, None, None], args.window - args.window // 8
    for kv_dtype in args.kv_cache_dtypes:
        stored = score(params, arch, ids, args.window, kv_dtype)
        row = {
            "name": f"{args.model.name}, keys and values in {kv_dtype}",
            "bits_per_byte": round(bits_per_byte(stored, documents), 4),
            "above_percent": above_percent(stored, exact),
            f"above_percent_from_token_{last}": above_percent(stored, exact, last),
        }
        print(json.dumps(row), flush=True)
    agreement = (scores[args.model, None, None].greedy_ids == scores[args.draft, None, None].greedy_ids).mean()
    print(json.dumps({"greedy_agreement": round(float(agreement), 4)}))


if __name__ == "__main__":
    main()
