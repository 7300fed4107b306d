"""Tokens that two tokenizers share, for a draft model whose tokenizer differs from the target model's."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.text.tokenizer import Tokenizer

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
NONE = -1


class CommonTokens(NamedTuple):
    """Draft model token ids by target model token id.

    Attributes:
        outputs: token with the same bytes, or the same role for special tokens; -1 if there is none.
        inputs: token for reading any sequence: as in `outputs`, or else the last draft token of the token's text.
    """

    outputs: list[int]
    inputs: list[int]

    @property
    def num_common(self) -> int:
        """Number of target model tokens that the draft model has too."""
        return sum(token_id != NONE for token_id in self.outputs)


def common_tokens(model: Tokenizer, draft: Tokenizer) -> CommonTokens:
    """Return the draft model token for each target model token (token-level intersection, Timor et al. 2025).

    Among tokens with the same bytes the last one counts: vocabulary files begin with single-byte tokens, which serve
    only for bytes that no other token covers.
    """
    own, others = _by_bytes(model), _by_bytes(draft)
    outputs = [NONE] * model.vocab_size
    for text, token_id in own.items():
        outputs[token_id] = others.get(text, NONE)
    for role in _ROLES:
        ids = [tokenizer.vocabulary().get(tokenizer.special_tokens.get(role, "")) for tokenizer in (model, draft)]
        if ids[0] is not None and ids[1] is not None:
            outputs[ids[0]] = ids[1]
    inputs = []
    for token_id, same in enumerate(outputs):
        found = [same] if same != NONE else draft.encode(model.token_text(token_id), add_special_tokens=False)
        inputs.append(found[-1] if found else 0)
    return CommonTokens(outputs, inputs)


def _by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Return the ids of a tokenizer's ordinary tokens by the bytes that each adds to a text."""
    table, found = tokenizer.byte_table, {}
    before = tokenizer.encode("a", add_special_tokens=False)  # decoders may remove a space at the start of a text
    start = tokenizer.decode(before)
    for token_id in range(tokenizer.vocab_size):
        if token_id not in tokenizer.special_ids:
            added = table[token_id] if table else tokenizer.decode([*before, token_id]).removeprefix(start).encode()
            found[added] = token_id
    found.pop(b"", None)
    return found
