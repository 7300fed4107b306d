"""Held-out bits per byte after a prompt, by budget for `kv_eviction` and `sparse_attention`.

    python scripts/sparsity_quality.py [--prompt-tokens 512] [--scored-tokens 256] [--documents 16] [--output FILE]

The embedded model reads each held-out module's first tokens as a prompt, and scores the next ones as output
tokens, which see no more than their budget allows: a constraint allows each only its true id. Log probabilities are the
model's, as constraints do not change them. Budgets are relative to the prompt.
"""

import argparse
import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.execution.sampling import pack_mask
from training import stdlib_corpus

FRACTIONS = (0.75, 0.5, 0.25)
METHODS = {"streaming_llm": "kv_eviction", "snapkv": "kv_eviction", "h2o": "kv_eviction", "quest": "sparse_attention"}


class TrueTokens:
    """Constraint that allows only a text's tokens.

    Args:
        token_ids: the text.
        vocab_size: number of ids.
    """

    error, has_ended = "", False

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._token_ids, self._vocab_size = token_ids, vocab_size
        self.forced: list[int] = []
        self.advance(())

    def advance(self, output_token_ids: Sequence[int]) -> None:
        """Allow the text's token after the output."""
        index = min(len(output_token_ids), len(self._token_ids) - 1)
        self.words: NDArray[np.int32] = pack_mask([self._token_ids[index]], self._vocab_size).view(np.int32)

    def again(self) -> "TrueTokens":
        return TrueTokens(self._token_ids, self._vocab_size)


def bits(engine: DrivenEngine, documents: Sequence[Sequence[int]], num_prompt: int) -> float:
    """Return the bits that the tokens after the first `num_prompt` take, over all documents."""
    outputs = []
    for index, ids in enumerate(documents):
        params = SamplingParams(temperature=0, max_tokens=len(ids) - num_prompt, ignore_eos=True, logprobs=0)
        group = engine.reader.read(str(index), list(ids[:num_prompt]), params)
        for request in group.requests:
            request.constraint = TrueTokens(ids[num_prompt:], engine.arch.vocab_size)
            request.waits_for_tokens = True
        engine.frontend.start(group)
        outputs.append(group.output)
    while engine.has_unfinished():
        engine.step()
    total = 0.0
    for output, ids in zip(outputs, documents, strict=True):
        [completion] = output.outputs
        assert list(completion.token_ids) == list(ids[num_prompt:]), "the constraint allows no other tokens"
        assert completion.logprobs is not None, "they were requested"
        total -= sum(each[token].logprob for each, token in zip(completion.logprobs, completion.token_ids, strict=True))
    return total / math.log(2)


def read_documents(num_tokens: int, max_documents: int) -> tuple[list[list[int]], Any]:
    """Return the first tokens from held-out modules that have as many, and the tokenizer."""
    with_tokenizer = DrivenEngine(EngineConfig(compile_ahead="minimal", max_model_len=64, num_pages=8))
    assert with_tokenizer.tokenizer is not None, "the embedded model has a tokenizer"
    tokenizer = with_tokenizer.tokenizer
    encoded = (tokenizer.encode(stdlib_corpus.as_text(each)) for each in stdlib_corpus.read(held_out=True))
    documents = [list(ids[:num_tokens]) for ids in encoded if len(ids) >= num_tokens][:max_documents]
    with_tokenizer.close()
    return documents, tokenizer


def main() -> None:
    """Score all methods and budgets; print a JSON line each, and write all to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--scored-tokens", type=int, default=256)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    num_prompt, num_tokens = args.prompt_tokens, args.prompt_tokens + args.scored_tokens
    documents, tokenizer = read_documents(num_tokens, args.documents)
    num_bytes = sum(len(tokenizer.decode(ids[num_prompt:]).encode()) for ids in documents)

    results = []
    dense = None
    for method, fraction in [(None, 1.0), *((method, each) for method in METHODS for each in FRACTIONS)]:
        budget = {"method": method, "budget": int(fraction * num_prompt)}
        sparsity = {} if method is None else {METHODS[method]: budget}
        engine = DrivenEngine(
            EngineConfig(max_model_len=num_tokens, compile_ahead="minimal", max_num_seqs=16, **sparsity)
        )
        bits_per_byte = bits(engine, documents, num_prompt) / num_bytes
        engine.close()
        dense = dense or bits_per_byte
        result = {"method": method or "dense", "budget_tokens": budget["budget"]}
        results.append(result | {"bits_per_byte": round(bits_per_byte, 4), "ratio": round(bits_per_byte / dense, 4)})
        print(json.dumps(results[-1]), flush=True)
    conditions = {"prompt_tokens": num_prompt, "scored_tokens": args.scored_tokens, "documents": len(documents)}
    conditions |= {"bytes": num_bytes, "python": platform.python_version(), "jax": jax.__version__}
    if args.output is not None:
        args.output.write_text(json.dumps({**conditions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
