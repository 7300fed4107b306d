"""Sampling on device: logits in, token ids and log probabilities out."""

from jaxserve.execution.sampling.logprobs import LogprobLayout, TokenLogprobs, token_logprobs
from jaxserve.execution.sampling.penalties import count_sampled, count_tokens
from jaxserve.execution.sampling.random_bits import DRAFT
from jaxserve.execution.sampling.rows import (
    RECORD_WORDS,
    SAMPLING_RECORD,
    SamplingRows,
    SlotRow,
    SlotTable,
    pack_records,
)
from jaxserve.execution.sampling.sampler import DraftedTokens, draw_by_weight, sample, token_weights
from jaxserve.execution.sampling.token_gather import padded_to_lanes
from jaxserve.execution.sampling.token_mask import mask_part, mask_size, pack_mask
from jaxserve.execution.sampling.vocab_split import VocabSplit

__all__ = [
    "DRAFT",
    "RECORD_WORDS",
    "SAMPLING_RECORD",
    "DraftedTokens",
    "LogprobLayout",
    "SamplingRows",
    "SlotRow",
    "SlotTable",
    "TokenLogprobs",
    "VocabSplit",
    "count_sampled",
    "count_tokens",
    "draw_by_weight",
    "mask_part",
    "mask_size",
    "pack_mask",
    "pack_records",
    "padded_to_lanes",
    "sample",
    "token_logprobs",
    "token_weights",
]
