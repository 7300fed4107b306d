"""Log probabilities on their way from the device's arrays to what a user reads."""

import codecs
import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxserve.api.outputs import CompletionOutput, Logprob
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.core.growing_outputs import RequestGroup
from jaxserve.execution.sampling import TokenLogprobs
from jaxserve.scheduling.request import Request
from jaxserve.text.loading import load_tokenizer
from jaxserve.text.token_texts import TokenTexts
from jaxserve.text.tokenizer import Tokenizer

NUM_ROWS = 3
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level()))


def from_device(seed: int) -> TokenLogprobs:
    """Random tokens for some rows."""
    rng = np.random.default_rng(seed)
    top_ids = np.stack([rng.permutation(300)[:20] for _ in range(NUM_ROWS)]).astype(np.int32)
    top_logprobs = -np.sort(rng.random((NUM_ROWS, 20), np.float32), axis=1)
    return TokenLogprobs(rng.random(NUM_ROWS, np.float32), rng.integers(1, 9, NUM_ROWS), top_ids, top_logprobs)


def whole_vocabulary(seed: int) -> tuple[TokenLogprobs, TokenLogprobs]:
    """Log probabilities of 320 tokens, some of them equal, in the order of ids; and best first, with the ids."""
    rng = np.random.default_rng(seed)
    by_id = -rng.integers(0, 200, (NUM_ROWS, 320)).astype(np.float32)
    order = np.argsort(-by_id, axis=1, kind="stable")
    own = rng.random(NUM_ROWS, np.float32), rng.integers(1, 9, NUM_ROWS)
    best_first = TokenLogprobs(*own, order, np.take_along_axis(by_id, order, axis=1))
    return TokenLogprobs(*own, np.zeros((NUM_ROWS, 0), np.int32), by_id), best_first


def new_group(tokenizer: Tokenizer | None, **params: int) -> RequestGroup:
    request = Request("0#0", [3, 4, 5, 6], SamplingParams(**params), seed=0, max_total_tokens=99)
    return RequestGroup("0", None, [request], tokenizer, lambda: 0.0)


def append(group: RequestGroup, token_id: int, logprobs: TokenLogprobs, row: int) -> CompletionOutput:
    group.append(0, [token_id], None, 1.0, logprobs, row)
    return group.output.outputs[0]


def entry(
    tokenizer: Tokenizer | None, logprobs: TokenLogprobs, row: int, token_id: int, top: int, before: list[int]
) -> dict[int, Logprob]:
    """Return the entry by its definition: the token itself, then the most likely ones."""

    def text(token_id: int) -> str | None:
        if tokenizer is None or token_id in tokenizer.special_ids:
            return tokenizer and tokenizer.decode([token_id], skip_special_tokens=False)
        pieces = {i: piece for piece, i in tokenizer.vocabulary().items()}
        data = [bytes(BYTES[c] for c in pieces.get(i, "") if c in BYTES) for i in (*before, token_id)]
        incremental = codecs.getincrementaldecoder("utf-8")("replace")
        return [incremental.decode(each) for each in data][-1]

    expected = {token_id: Logprob(float(logprobs.logprob[row]), int(logprobs.rank[row]), text(token_id))}
    for rank, other in enumerate(logprobs.top_ids[row, : top if top >= 0 else None].tolist(), start=1):
        if other not in expected:
            expected[other] = Logprob(float(logprobs.top_logprobs[row, rank - 1]), rank, text(other))
    return expected


@pytest.mark.parametrize("with_text", [True, False])
@pytest.mark.parametrize(
    ("top", "whole"), [*((top, whole) for top in (0, 1, 5, 20) for whole in (False, True)), (320, True), (-1, True)]
)
def test_logprob_entries_equal_the_devices_results(
    tokenizer: Tokenizer, top: int, whole: bool, with_text: bool
) -> None:
    group = new_group(tokenizer if with_text else None, logprobs=top)
    expected = []
    for step in range(4):
        row = step % NUM_ROWS
        sent, found = whole_vocabulary(step) if whole else (from_device(step),) * 2
        token_id = int(found.top_ids[row, step]) if step < 2 else 310 + step  # is among the most likely, or not
        output = append(group, token_id, sent, row)
        before = [3, 4, 5, 6, *output.token_ids[:-1]]
        expected.append(entry(tokenizer if with_text else None, found, row, token_id, top, before))
    read = output.logprobs
    assert type(read) is list
    assert read is output.logprobs
    assert read == expected
    assert output.logprobs_since(1, 3) == expected[1:3]
    assert [list(got) for got in read] == [list(want) for want in expected], "in the same order"
    assert (read[-1], read[1:3], len(read)) == (expected[-1], expected[1:3], 4)
    with pytest.raises(IndexError):
        read[4]
    assert output.cumulative_logprob == sum(e[i].logprob for i, e in zip(output.token_ids, expected, strict=True))
    for copied in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert type(copied.logprobs) is list
        assert copied.logprobs == expected
    assert repr(read) == repr(expected)


def test_entries_of_the_prompt_follow_none(tokenizer: Tokenizer) -> None:
    group, found = new_group(tokenizer, prompt_logprobs=2), from_device(0)
    group.append_prompt_logprobs(1, 2, found, 0)
    group.append_prompt_logprobs(2, 2, found, 1)  # a preempted request has the first of them
    rows = [(0, 4), (1, 5), (2, 6)]
    prompt = [3, 4, 5, 6]
    expected = [None, *(entry(tokenizer, found, row, token_id, 2, prompt[: row + 1]) for row, token_id in rows)]
    assert group.output.prompt_logprobs == expected
    group.restart()
    assert group.output.prompt_logprobs == [None]


def test_the_thread_that_steps_decodes_and_makes_nothing(tokenizer: Tokenizer) -> None:
    decoded: list[int] = []
    decode = tokenizer.decode_ids
    tokenizer = Tokenizer(
        lambda text, add_special: [],
        lambda ids, skip_special: [decoded.extend(ids), decode(ids, skip_special)][1],
        vocab_size=320,
        special_tokens={},
        special_ids=frozenset(),
        bos_token_id=None,
        eos_token_ids=(),
        chat_template={},
        encode_pair=lambda a, b: [],
        piece=str,
    )
    # requests without a detokenizer, which would decode the tokens too
    groups, found = [new_group(None, logprobs=20) for _ in range(2)], from_device(0)
    for group in groups:
        for completion in group._completions:
            assert completion.logprobs is not None
            completion.logprobs._texts = TokenTexts(tokenizer, frozenset())
    outputs = [append(group, 7, found, 0) for group in groups]
    gc.collect()
    before = len(gc.get_objects())
    for group in groups:
        for _ in range(50):
            append(group, 7, found, 0)
    gc.collect()
    assert len(gc.get_objects()) < before + 50, "no object of a token is the garbage collector's"
    assert not decoded
    for output in outputs:
        assert output.logprobs is not None
        assert len(list(output.logprobs)) == 51
    assert decoded


def test_without_detokenization_no_token_is_decoded(tokenizer: Tokenizer) -> None:
    group, found = new_group(tokenizer, logprobs=2, prompt_logprobs=1, detokenize=False), from_device(0)
    group.append_prompt_logprobs(1, 3, found, 0)
    output = append(group, 7, found, 1)
    tables = [*(output.logprobs or []), *(group.output.prompt_logprobs or [])[1:]]
    assert len(tables) == 4
    assert {logprob.decoded_token for table in tables for logprob in (table or {}).values()} == {None}


def test_a_growing_list_is_read_by_several_threads(tokenizer: Tokenizer) -> None:
    group, found = new_group(tokenizer, logprobs=3), from_device(0)
    output = append(group, 7, found, 0)

    def read() -> list[int]:
        lengths = [0]
        while lengths[-1] < 300:
            lengths.append(len(output.logprobs or []))
        return lengths

    with ThreadPoolExecutor(3) as threads:
        readers = [threads.submit(read) for _ in range(3)]
        for _ in range(299):
            append(group, 7, found, 0)
    for reader in readers:
        assert reader.result() == sorted(reader.result())
    assert output.logprobs == [entry(tokenizer, found, 0, 7, 3, [7])] * 300


def test_the_prompt_of_an_output_is_the_callers_to_change() -> None:
    """The prefix cache compares later prompts with the request's own list."""
    group = new_group(None)
    group.output.prompt_token_ids[0] = 99
    assert group.requests[0].prompt_token_ids[0] != 99
