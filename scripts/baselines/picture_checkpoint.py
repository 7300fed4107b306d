"""A random-weight checkpoint that takes pictures: a quarter of the layers in Qwen2.5-VL's tower and in Qwen2.5-0.5B."""

import json
from pathlib import Path
from typing import Any

PROMPT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is in this picture?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")
_TOKENS += ("<|image_pad|>", "<|video_pad|>")
_SPACES = "\u0120\u010a"  # space and line feed, as tokenizers of bytes write them
TEXT = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 6,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "tie_word_embeddings": True,
}
VISION = {
    "depth": 8,
    "fullatt_block_indexes": [7],
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 896,
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def make_checkpoint(directory: Path) -> int:
    """Write a float32 checkpoint with 264 tokens; return its parameter count. Needs torch."""
    import torch  # noqa: PLC0415 - only here, and heavy
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    ids = _write_tokenizer(directory)
    image, video, start, end, stop = (
        ids[f"<|{name}|>"] for name in ("image_pad", "video_pad", "vision_start", "vision_end", "im_end")
    )
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "vocab_size": len(ids), "eos_token_id": stop, "bos_token_id": ids["<|endoftext|>"]},
        vision_config=VISION,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    model.save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    named = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}  # some versions write it in text_config only
    (directory / "config.json").write_text(json.dumps(written | named, indent=2))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return sum(parameter.numel() for parameter in model.parameters())


def _write_tokenizer(directory: Path) -> dict[str, int]:
    """Write a tokenizer of ASCII characters and special tokens, whose texts show all ids; return its ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - only here

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char if char.isascii() or char in _SPACES else f"<{index}>": index for index, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "vocab.json").write_text(json.dumps(vocab))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    fields: dict[str, Any] = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields | {"pad_token": "<|endoftext|>"}))
    return tokenizer.get_vocab(with_added_tokens=True)
