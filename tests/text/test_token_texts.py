"""Texts and offsets of tokens in replies, against what transformers decodes."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny_tokenizers
import tokenizers
import transformers

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.stream_events import OutputReader
from jaxserve.core.growing_outputs import RequestGroup
from jaxserve.execution.sampling import TokenLogprobs
from jaxserve.openai.context import BodyContext
from jaxserve.openai.format import CHAT, COMPLETIONS, parse_body
from jaxserve.openai.replies import Reply
from jaxserve.scheduling.request import FinishReason, Request
from jaxserve.text.loading import load_hf_tokenizer, load_tokenizer
from jaxserve.text.token_texts import text_offsets
from jaxserve.text.tokenizer import Tokenizer

TEXTS = ["日本 ok", "Once upon a time", "naïve façades, 東京 and 😀 too", "  two  spaces ", "</s>a</s> b", "x"]


def word_pieces() -> tokenizers.Tokenizer:
    """Return a tokenizer like BERT's, which lower-cases texts and joins pieces that begin with ##."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[UNK]", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([*tiny_tokenizers.TEXT, *TEXTS], trainer)
    return tokenizer


FAMILIES = {
    "byte_level": tiny_tokenizers.byte_level,
    "byte_fallback": tiny_tokenizers.byte_fallback,
    "byte_fallback_plain": lambda: tiny_tokenizers.byte_fallback(strip=False),
    "metaspace": tiny_tokenizers.metaspace,
    "word_pieces": word_pieces,
}


class Family(NamedTuple):
    """Tokenizer of a family, here and in transformers."""

    name: str
    own: Tokenizer
    theirs: transformers.PreTrainedTokenizerBase

    def decode(self, token_ids: list[int], *, skips: bool = True) -> str:
        """Return what transformers decodes."""
        text = self.theirs.decode(token_ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def starts(self, token_ids: list[int], *, skips: bool = True) -> list[int]:
        """Return where each token begins in the text: behind the characters that those before it complete."""
        whole, starts = self.decode(token_ids, skips=skips), [0]
        for index in range(1, len(token_ids)):
            prefix = self.decode(token_ids[:index], skips=skips)
            same = next((i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), len(prefix))
            starts.append(max(starts[-1], same))  # a fallback to bytes decodes whole runs of them at once, or not
        return starts


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    path = tiny_tokenizers.write(
        tmp_path_factory.mktemp("family"),
        FAMILIES[request.param](),
        chat_template="[bot]",
        clean_up_tokenization_spaces=False,
    )
    return Family(request.param, load_tokenizer(path), load_hf_tokenizer(path))


def found(token_ids: list[int], num_top: int) -> TokenLogprobs:
    """Return log probabilities from a device: the tokens themselves, then others."""
    others = [[token_id, *range(5, 4 + num_top)] for token_id in token_ids]
    scores = [-np.arange(num_top, dtype=np.float32) - 0.5] * len(token_ids)
    ones = np.ones(len(token_ids), np.int32)
    return TokenLogprobs(np.full(len(token_ids), -0.5, np.float32), ones, np.array(others, np.int32), np.array(scores))


def run(
    family: Family, prompt: str | list[int], token_ids: list[int], body: dict[str, Any], *, step: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the choice of a whole reply, and the one that the parts of a stream add up to."""
    url = CHAT if "messages" in body else COMPLETIONS
    content = body if url == CHAT else body | {"prompt": prompt}
    request = parse_body(
        url, content | {"stream": True}, BodyContext("m", (), family.own, SamplingParams(), may_stream=True)
    )
    limit, keeps_first = request.params.truncate_prompt_tokens, request.params.truncation_side == "right"
    is_text = isinstance(prompt, str)
    ids = family.own.encode(prompt, max_tokens=limit, keeps_first=keeps_first) if is_text else prompt
    sample = Request("0#0", ids, request.params, seed=0, max_total_tokens=999)
    group = RequestGroup("0", prompt if isinstance(prompt, str) else None, [sample], family.own, lambda: 0.0)
    if request.params.prompt_logprobs is not None:
        group.append_prompt_logprobs(1, len(ids) - 1, found(ids[1:], 3), 0)
    streamed, reader = Reply(request, family.own, response_id="x", created_s=1), OutputReader(group.output)
    events: list[bytes] = []
    for start in range(0, len(token_ids), step):
        part = token_ids[start : start + step]
        is_last = start + step >= len(token_ids)
        reason = FinishReason.LENGTH if is_last else None
        _, stopped = group.append(0, part, reason, 1.0, found(part, 3))
        if is_last or stopped:
            group.finish(0, reason or FinishReason.STOP, 1.0, stopped)
        events += streamed.events(0, group.output, reader.read())
        if stopped:
            break
    whole = Reply(request, family.own, response_id="x", created_s=1).body([group.output])["choices"][0]
    return whole, merged(events)


def merged(events: list[bytes]) -> dict[str, Any]:
    """Return the text and the log probabilities of all parts."""
    text, logprobs = "", {}
    for event in events:
        (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
        text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for name, values in (choice["logprobs"] or {}).items():
            logprobs[name] = logprobs.get(name, []) + (values or [])
    return {"text": text, "logprobs": logprobs}


def visible(family: Family, token_ids: list[int]) -> Iterator[int]:
    """Yield the positions of tokens that leave text."""
    yield from (i for i, token_id in enumerate(token_ids) if token_id not in family.own.special_ids)


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("text", TEXTS)
def test_offsets_are_indices_in_the_text(family: Family, text: str, step: int) -> None:
    prompt = family.own.encode("Once upon")
    first, token_ids = len(prompt), family.own.encode(text, add_special_tokens=False)
    whole, streamed = run(family, prompt, token_ids, {"logprobs": 2}, step=step)
    assert streamed == {name: whole[name] for name in ("text", "logprobs")}
    shown, found = whole["text"], whole["logprobs"]
    assert family.decode(prompt + token_ids) == family.decode(prompt) + shown
    begin = len(family.decode(prompt))
    assert found["text_offset"] == [start - begin for start in family.starts(prompt + token_ids)[first:]]
    assert "".join(found["tokens"][i] for i in visible(family, token_ids)) == shown
    for i in visible(family, token_ids):
        token, offset = found["tokens"][i], found["text_offset"][i]
        assert shown[offset : offset + len(token)] == token
        assert found["top_logprobs"][i][token] == found["token_logprobs"][i]


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_of_an_echo(family: Family, text: str) -> None:
    token_ids = family.own.encode(" a time", add_special_tokens=False)
    whole, streamed = run(family, text, token_ids, {"logprobs": 2, "echo": True}, step=1)
    assert streamed == {name: whole[name] for name in ("text", "logprobs")}
    assert whole["text"].startswith(text)
    prompt_ids, offsets = family.own.encode(text), whole["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    if family.decode(family.own.encode(text, False), skips=False) == text:
        plain = family.own.encode(text, False)
        added = len(prompt_ids) - len(plain)
        assert offsets[added : len(prompt_ids)] == family.starts(plain, skips=False)
    else:  # the text is changed: the tokenizer knows the places
        mapping = family.theirs(text, return_offsets_mapping=True)["offset_mapping"]
        assert offsets[: len(prompt_ids)] == [start for start, _ in mapping]
    shown = whole["text"]
    for i in visible(family, token_ids):
        token, offset = (whole["logprobs"][name][len(prompt_ids) + i] for name in ("tokens", "text_offset"))
        assert shown[offset : offset + len(token)] == token


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_of_an_echo_of_tokens(family: Family, text: str) -> None:
    prompt_ids = family.own.encode(text)
    whole, _ = run(family, prompt_ids, [5], {"logprobs": 2, "echo": True}, step=1)
    shown = family.decode(prompt_ids, skips=False)
    assert whole["text"].startswith(shown)
    assert whole["logprobs"]["text_offset"][: len(prompt_ids)] == family.starts(prompt_ids, skips=False)


def test_offsets_of_the_beginning_of_a_text(family: Family) -> None:
    text = "Once upon a time"
    whole = family.own.encode(text)
    kept = family.own.encode(text, max_tokens=len(whole) - 1, keeps_first=True)
    assert kept != family.own.encode(text, max_tokens=len(whole) - 1)
    offsets = text_offsets(family.own, text, kept, keeps_first=True)
    assert offsets == text_offsets(family.own, text, whole)[: len(kept)]


def test_offsets_of_the_end_of_a_text(family: Family) -> None:
    """Only the last tokens of a long prompt are kept, and its text is echoed as it came."""
    text = "Once upon a time"
    kept = family.own.encode(text, max_tokens=len(family.own.encode(text)) - 1)
    offsets = text_offsets(family.own, text, kept)
    assert offsets == sorted(offsets)
    assert offsets[-1] == text_offsets(family.own, text, family.own.encode(text))[-1]
    assert offsets[-2] > 0
    assert offsets[0] in text_offsets(family.own, text, family.own.encode(text))


@pytest.mark.parametrize("side", ["left", "right"])
def test_offsets_of_truncated_repetitive_text(family: Family, side: str) -> None:
    """The tokens that are kept do not show the side on which they were cut off."""
    text, token_ids = "to " * 12, [5]
    body = {"logprobs": 2, "echo": True, "truncation_side": side}
    plain, known = family.own.encode(text, add_special_tokens=False), family.own.encode(text)
    start = next(i for i in range(len(known)) if known[i : i + len(plain)] == plain)
    whole = run(family, text, token_ids, body, step=1)[0]["logprobs"]["text_offset"][start : start + len(plain)]
    for num_kept in (1, 2, len(plain) // 2, len(plain) - 1):
        limit = len(known) - len(plain) + num_kept
        cut, _ = run(family, text, token_ids, body | {"truncate_prompt_tokens": limit}, step=1)
        offsets = cut["logprobs"]["text_offset"][:limit]
        assert offsets == sorted(offsets)
        expected = whole[-num_kept:] if side == "left" else whole[:num_kept]
        assert offsets[start : start + num_kept] == expected
        first, last = (whole[-num_kept], len(text)) if side == "left" else (0, whole[num_kept])
        assert all(first <= offset <= last for offset in offsets)


@pytest.mark.parametrize("step", [1, 100])
@pytest.mark.parametrize(("skips", "stop"), [(True, None), (False, None), (True, "pon"), (True, "n a")])
def test_offsets_with_stop_strings_and_special_tokens(family: Family, step: int, skips: bool, stop: str | None) -> None:
    prompt = family.own.encode("Once")
    plain = family.own.encode(" upon a time", add_special_tokens=False)
    special = sorted(family.own.special_ids)[-1]
    token_ids = [*plain[:2], special, *plain[2:]]
    body = {"logprobs": 2, "skip_special_tokens": skips} | ({"stop": stop} if stop else {})
    whole, streamed = run(family, prompt, token_ids, body, step=step)
    assert streamed == {name: whole[name] for name in ("text", "logprobs")}
    found, begin = whole["logprobs"], len(family.decode(prompt, skips=skips))
    num_tokens = len(found["tokens"])
    expected = family.starts(prompt + token_ids, skips=skips)[len(prompt) : len(prompt) + num_tokens]
    assert found["text_offset"] == [start - begin for start in expected]
    if stop:
        assert stop not in whole["text"]
        assert whole["stop_reason"] == stop


def test_incomplete_character_at_the_end_gets_replacement_text(family: Family) -> None:
    token_ids = family.own.encode("a 😀", add_special_tokens=False)[:-1]
    whole, streamed = run(family, family.own.encode("Once"), token_ids, {"logprobs": 2}, step=1)
    assert streamed == {name: whole[name] for name in ("text", "logprobs")}
    assert "".join(whole["logprobs"]["tokens"][i] for i in visible(family, token_ids)) == whole["text"]


@pytest.mark.parametrize("text", TEXTS[:4])
def test_chat_logprob_bytes_are_the_bytes_of_each_token(family: Family, text: str) -> None:
    token_ids = family.own.encode(text, add_special_tokens=False)
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    whole, streamed = run(family, family.own.encode("Once"), token_ids, body, step=1)
    content = whole["logprobs"]["content"]
    assert streamed["logprobs"]["content"] == content
    shown = whole["message"]["content"]
    shown_entries = [content[i] for i in visible(family, token_ids)]
    assert "".join(entry["token"] for entry in shown_entries) == shown
    assert bytes(byte for entry in shown_entries for byte in entry["bytes"]).decode() == shown
