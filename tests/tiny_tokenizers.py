"""Small tokenizers of common decoder families, built with the `tokenizers` library alone."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "Once upon a time there was a small engine that could.",
    "Tokens go in, tokens come out; naïve façades, 東京 and 😀 too.",
    "    indented = code(1, 2)\n\treturn 'x'",
]


CHAT_TEMPLATE = """{{ bos_token }}{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('a system message must come first') }}
    {%- endif %}
<|{{ message['role'] }}|>{% if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}
{% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}
    {%- if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if thinking is defined and thinking %}<think>{% endif %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


def byte_level(vocab_size: int = 320) -> Tokenizer:
    """Return a byte-level tokenizer like those of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """Return a tokenizer like those of Llama 2 and Mistral, or with `strip=False` Gemma's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", *sorted(set("".join(TEXT)) - set(" \n\t東京😀"))]
    merges = [("▁", "a"), ("i", "n"), ("o", "u"), ("t", "i")]
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Return a tokenizer like T5's, whose decoder is no concatenation of bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def write(directory: Path, tokenizer: Tokenizer, **config: object) -> Path:
    """Write and return a Hugging Face directory of `tokenizer`, with `config` in tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def saved_by_transformers(kind: str, directory: Path) -> Path:
    """Write a directory as `transformers` does."""
    import transformers

    if kind == "PreTrainedTokenizerFast":
        slow = transformers.PreTrainedTokenizerFast(
            tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>", pad_token="[PAD]"
        )
        slow.add_tokens([AddedToken("<|im_start|>", special=True), "plainword"])
        slow.chat_template = CHAT_TEMPLATE
    elif kind == "LlamaTokenizer":
        model = json.loads(byte_fallback().to_str())["model"]
        merges = [tuple(m) for m in model["merges"]]
        slow = transformers.LlamaTokenizer(vocab=model["vocab"], merges=merges, add_bos_token=True)
    else:
        model = json.loads(byte_level().to_str())["model"]
        merges = [tuple(m) for m in model["merges"]]
        names = {"unk_token": "<s>", "bos_token": "<s>", "eos_token": "</s>"}
        slow = getattr(transformers, kind)(vocab=model["vocab"], merges=merges, **names)
    slow.save_pretrained(directory)
    return directory
