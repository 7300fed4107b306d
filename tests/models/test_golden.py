"""Logits of the main families against those that transformers computed, on file, where torch is not installed."""

import numpy as np
import pytest

from tests import golden_logits
from tests.checkpoints import VARIED, write_plain_checkpoint
from tests.models.test_parity import assert_close, load_logits
from tests.oracles import has_torch, skip
from tests.parameters import some_by_default

# If torch is installed, other tests compare the logits of all families with those that it computes.
BY_DEFAULT = ("deepseek_v3",) if has_torch else VARIED
families = pytest.mark.parametrize("family", some_by_default(golden_logits.FAMILIES, *BY_DEFAULT))


@families
def test_logits_are_those_on_file(tmp_path, family):
    write_plain_checkpoint(tmp_path, family)
    _, token_ids, logits, _ = load_logits(tmp_path, num_tokens=golden_logits.NUM_TOKENS)
    np.testing.assert_array_equal(token_ids, golden_logits.token_ids(logits.shape[1]))
    with np.load(golden_logits.GOLDEN) as golden:
        assert_close(logits, golden[family])


@families
def test_the_file_is_current(family):
    if not has_torch:
        skip()
    assert golden_logits.stale((family,)) == []
