"""Sampling on device: logits in, token ids and log probabilities out."""

from jaxserve.sampling.by_token import padded_to_lanes
from jaxserve.sampling.logprobs import LogprobLayout, TokenLogprobs, token_logprobs
from jaxserve.sampling.penalties import count_sampled, count_tokens
from jaxserve.sampling.random_bits import DRAFT
from jaxserve.sampling.rows import RECORD_WORDS, SAMPLING_RECORD, SamplingRows, SlotRow, SlotTable, pack_records
from jaxserve.sampling.sampler import DraftedTokens, draw_by_weight, sample, token_weights
from jaxserve.sampling.token_mask import mask_part, mask_size, pack_mask
from jaxserve.sampling.vocab_split import VocabSplit

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
