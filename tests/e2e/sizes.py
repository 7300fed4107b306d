"""Sizes of the tiny engines that the tests of this folder share."""

from typing import Any

# 96 positions in the pool and rows of up to 64: four busy rows do not fit, so that preemption is common.
SIZES: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "num_pages": 24,
    "multi_step": 1,
    "compile_ahead": "minimal",
    "forbid_compiles": True,
}
# The quickest engine to start: one program, for one token.
ONE_ROW: dict[str, Any] = {**SIZES, "max_num_seqs": 1, "max_num_batched_tokens": 1, "num_pages": 16}
# Sizes for the model that is embedded in the package.
EMBEDDED: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 16,
    "multi_step": 1,
    "compile_ahead": "minimal",
}
VOCAB_SIZE = 320
EOS = 1
