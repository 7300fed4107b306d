"""A tiny LLaVA checkpoint with a tokenizer, a chat template and an image processor."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import tiny_tokenizers
from tokenizers import AddedToken

from tests.vision_checkpoints import FAMILIES, TEXT

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
IMAGE, VOCAB_SIZE = 319, 320
NUM_EMBEDDINGS = 25  # per picture
PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 20},
    "crop_size": {"height": 20, "width": 20},
    "do_center_crop": True,
}


def write(path: Path) -> Any:
    """Write the checkpoint; return its model as transformers runs it."""
    family = dataclasses.replace(
        FAMILIES["llava"],
        config={"image_token_index": IMAGE, "image_seq_length": NUM_EMBEDDINGS},
        text={**TEXT, "vocab_size": VOCAB_SIZE, "eos_token_id": 1},
    )
    model = family.write(path)
    tokenizer = tiny_tokenizers.byte_level(IMAGE)
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    assert tokenizer.token_to_id("<image>") == IMAGE
    tiny_tokenizers.write(path, tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (path / "generation_config.json").unlink(missing_ok=True)
    return model
