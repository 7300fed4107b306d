"""Pictures with crops (Gemma 3's pan and scan), from texts, ids and chats: the ids of transformers."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
import transformers
from PIL import Image
from tokenizers import AddedToken

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.engine import Engine
from jaxserve.errors import RequestError
from jaxserve.offline.llm import LLM
from tests.e2e.test_pictures import TEXT
from tests.oracles import torch
from tests.soon_compiled import few_programs
from tests.vision_checkpoints import FAMILIES

pytestmark = pytest.mark.full

SPECIAL = {"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
FIELDS = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 24, "width": 24}}
CROPS = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}\n{% for part in m.content %}"
    "{% if part.type == 'image' %}<boi>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
SIZES: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 2, "max_num_batched_tokens": 64, "page_size": 4}
SIZES |= {"num_pages": 400, "multi_step": 1, "compile_ahead": "minimal", "encoder_cache_size": 300}
PICTURES = [
    Image.fromarray(np.random.default_rng(sum(size)).integers(0, 256, (*size, 3), np.uint8))
    for size in ((20, 65), (30, 30), (77, 25))
]


@dataclasses.dataclass
class Model:
    """A tiny checkpoint in transformers, with its processor, and an engine over it."""

    model: Any
    processor: Any
    llm: LLM

    def greedy(self, text: str, *pictures: Image.Image, **adjusted: Any) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt, and those that transformers generates after it."""
        given = self.processor(images=[list(pictures)], text=[text], images_kwargs=adjusted, return_tensors="pt")
        given.pop("num_crops", None)
        with torch.no_grad():
            out = self.model.generate(**given, max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
        ids = given["input_ids"][0].tolist()
        return ids, out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("gemma3")
    tokenizer = tiny_tokenizers.byte_level(317)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL.values()])
    ids = {name: tokenizer.token_to_id(text) for name, text in SPECIAL.items()}
    family = FAMILIES["gemma3"]
    config = {**family.config, **{f"{name}_index": token_id for name, token_id in ids.items()}}
    text = {**family.text, **TEXT["gemma3"], "vocab_size": 320}
    model = dataclasses.replace(family, config=config, text=text).write(path)
    tiny_tokenizers.write(path, tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    (path / "preprocessor_config.json").write_text(json.dumps(FIELDS))
    (path / "generation_config.json").unlink(missing_ok=True)
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=SPECIAL)
    processor = transformers.Gemma3Processor(Gemma3ImageProcessorPil(size=FIELDS["size"]), theirs, image_seq_length=9)
    with few_programs():
        llm = LLM.over(Engine(EngineConfig(str(path), **SIZES)))
    yield Model(model, processor, llm)
    llm.close()


def test_crops_have_the_outputs_of_transformers(served: Model) -> None:
    """Texts, their expanded ids, and chats; without crops and with other limits in the same engine."""
    texts = ["Once <boi> upon\n<boi><boi>\n a time", "<boi>\n\nOnce <boi> there <boi>"]
    few = {**CROPS, "pan_and_scan_max_num_crops": 2}
    cases = [(text, adjusted) for text in texts for adjusted in (CROPS, few, {})]
    expected = [served.greedy(text, *PICTURES, **adjusted) for text, adjusted in cases]
    given: list[Any] = [
        {"prompt": text, "multi_modal_data": {"image": PICTURES}, "mm_processor_kwargs": adjusted}
        for text, adjusted in cases
    ]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    outputs = served.llm.generate(given, params, use_tqdm=False)
    assert [(each.prompt_token_ids, list(each.outputs[0].token_ids)) for each in outputs] == expected
    again = [{**each, "prompt_token_ids": ids} for each, (ids, _) in zip(given, expected, strict=True)]
    outputs = served.llm.generate(again, params, use_tqdm=False)
    assert [(each.prompt_token_ids, list(each.outputs[0].token_ids)) for each in outputs] == expected
    parts = [{"type": "image", "image": PICTURES[0]}, {"type": "text", "text": "Tokens go in"}]
    (output,) = served.llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False, mm_processor_kwargs=CROPS)
    chat = served.greedy("user\n<boi>Tokens go in", PICTURES[0], **CROPS)
    assert (output.prompt_token_ids, list(output.outputs[0].token_ids)) == chat
    assert len(chat[0]) > 4 * 9


def test_wrong_settings_are_refused(served: Model) -> None:
    """Other sizes than the tower takes, and too many crops."""
    prompt = {"prompt": "<boi>", "multi_modal_data": {"image": PICTURES[0]}}
    for adjusted, word in (
        ({"size": {"height": 20, "width": 20}}, r"mm_processor_kwargs must make \(6, 6\) patches"),
        ({**CROPS, "pan_and_scan_max_num_crops": 17}, r"pan_and_scan_max_num_crops must be an integer in \[1, 16\]"),
        ({**CROPS, "pan_and_scan_max_num_crop": 1}, "did you mean pan_and_scan_max_num_crops"),
    ):
        with pytest.raises(RequestError, match=word):
            served.llm.generate([{**prompt, "mm_processor_kwargs": adjusted}], use_tqdm=False)
