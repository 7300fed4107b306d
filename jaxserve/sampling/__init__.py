"""Sampling on device: logits in, token ids and log probabilities out."""

from jaxserve.sampling.by_token import padded_to_lanes
from jaxserve.sampling.logprobs import LogprobLayout, TokenLogprobs, token_logprobs
from jaxserve.sampling.penalties import count_sampled, count_tokens
from jaxserve.sampling.rows import SAMPLING_FIELDS, SAMPLING_RECORD, SamplingRows, SlotRow, SlotTable, record_column
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.token_mask import mask_part, mask_size, pack_mask
from jaxserve.sampling.vocab_split import VocabSplit

__all__ = [
    "SAMPLING_FIELDS",
    "SAMPLING_RECORD",
    "LogprobLayout",
    "SamplingRows",
    "SlotRow",
    "SlotTable",
    "TokenLogprobs",
    "VocabSplit",
    "count_sampled",
    "count_tokens",
    "mask_part",
    "mask_size",
    "pack_mask",
    "padded_to_lanes",
    "record_column",
    "sample",
    "token_logprobs",
]
