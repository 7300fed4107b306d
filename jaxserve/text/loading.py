"""Loading of tokenizers from local files. Imports neither jax nor torch.

The `tokenizers` library reads `tokenizer.json`; its import takes 0.03 s instead of over 2 s for `transformers`. As in
`transformers`, special tokens from `tokenizer_config.json` and `special_tokens_map.json` are added. If there is a
`tokenizer.json`, its post-processor defines the tokens around a prompt, and `add_bos_token` and `add_eos_token` in
`tokenizer_config.json` are ignored, as in transformers 5. `transformers.AutoTokenizer` loads directories without
`tokenizer.json`, and `gguf_tokenizer` GGUF files.
"""

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from jaxserve.api.chat_options import DEFAULT_CHAT_OPTIONS, ChatOptions
from jaxserve.api.token_ids import TokenIds
from jaxserve.errors import ConfigError
from jaxserve.text import gguf_tokenizer
from jaxserve.text.encoding import LONG_TEXT_CHARS, encode_freely
from jaxserve.text.literal_text import LiteralText
from jaxserve.text.token_bound import TokenBound
from jaxserve.text.token_stream import ByteTable
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.transformers_advice import without_torch_advice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def load_tokenizer(path: str | Path, chat_options: ChatOptions = DEFAULT_CHAT_OPTIONS) -> Tokenizer:
    """Load the tokenizer in a Hugging Face directory or a GGUF file, from local files only.

    Args:
        path: the directory or the file.
        chat_options: chat options.

    Raises:
        ConfigError: there is no loadable tokenizer; the message names the expected files.
    """
    try:
        return _load(Path(path), chat_options)
    except ConfigError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the JSON files beside the tokenizer in {path} (tokenizer_config.json, special_tokens_map.json, "
            f"chat_template.json, generation_config.json) must have fields as transformers writes them, got a fault: "
            f"{type(error).__name__} {_first_line(error)}"
        ) from error


def _load(directory: Path, chat_options: ChatOptions) -> Tokenizer:
    """Load the tokenizer in a directory or a GGUF file; invalid fields in JSON files raise Python's own exceptions."""
    if (gguf := _gguf_file(directory)) is not None:
        backend, config, ends = _load_gguf(gguf)
        return _from_backend(backend, config, directory, chat_options, ends)
    if not directory.is_dir():
        raise ConfigError(f"the tokenizer must be a local directory or a .gguf file, got {str(directory)!r}")
    config = _read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older checkpoints use special_tokens_map.json
        config |= _read_json(directory / "special_tokens_map.json")
    file = directory / "tokenizer.json"
    if not file.is_file():
        return _from_transformers(_load_slow(directory), config, directory, chat_options)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{file} must be readable by tokenizers {tokenizers.__version__}, but: {error}") from error
    _add_special_tokens(backend, config)
    return _from_backend(backend, config, directory, chat_options)


def _from_backend(
    backend: tokenizers.Tokenizer,
    config: dict[str, Any],
    directory: Path,
    chat_options: ChatOptions,
    ends: Sequence[int] = (),
) -> Tokenizer:
    """Return the tokenizer for a backend of the `tokenizers` library.

    Args:
        backend: backend with all added tokens.
        config: content of tokenizer_config.json, or its equivalent.
        directory: directory with the model's other files.
        chat_options: chat options.
        ends: further end-of-sequence ids.
    """
    # Files may contain truncation and padding settings from training.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    special = _special_token_texts(config)
    has_literals = chat_options.special_tokens_as_text and not backend.encode_special_tokens
    return Tokenizer(
        partial(_encode, backend),
        partial(_decode, backend),
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        special_tokens=special,
        special_ids=frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special),
        bos_token_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        eos_token_ids=_eos_ids(
            backend.token_to_id(special["eos_token"]) if "eos_token" in special else None, directory, ends
        ),
        chat_template=_chat_templates(config, directory),
        chat_options=chat_options,
        literal=LiteralText(backend) if has_literals else None,
        byte_table=ByteTable.from_backend(backend),
        vocabulary=backend.get_vocab,
        piece=backend.id_to_token,
        json_text=backend.to_str,
        new_bound=partial(TokenBound.from_backend, backend),
        encode_pair=partial(_encode_pair, backend),
        find_spans=partial(_spans, backend),
    )


def _spans(backend: tokenizers.Tokenizer, text: str) -> tuple[TokenIds, list[tuple[int, int]]]:
    """Return the token ids of a text, and the (begin, end) of each token's characters."""
    encoding = backend.encode(text) if len(text) < LONG_TEXT_CHARS else backend.encode_batch([text])[0]
    return encoding.ids, encoding.offsets


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> TokenIds:
    """Return a text's token ids; other threads run Python while a long text is encoded."""
    return encode_freely(backend, text, len(text), add_special_tokens=add_special_tokens)


def _encode_pair(backend: tokenizers.Tokenizer, first: str, second: str) -> TokenIds:
    """Return the token ids of two texts as one prompt, with special tokens."""
    return encode_freely(backend, (first, second), len(first) + len(second), add_special_tokens=True)


def _decode(backend: tokenizers.Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Return the text of token ids; other threads run Python while many ids are decoded."""
    if len(token_ids) < LONG_TEXT_CHARS:
        return backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
    return backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]


def load_hf_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    """Load the same tokenizer as `load_tokenizer`, as an instance of a class in `transformers`.

    A `tokenizer.json` defines the tokenisation, as in `load_tokenizer`; AutoTokenizer might rebuild the model family's
    tokenizer from the vocabulary instead.

    Raises:
        ConfigError: the directory has no tokenizer that transformers can load.
    """
    with without_torch_advice():
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - over two seconds

    directory = Path(path)
    if (gguf := _gguf_file(directory)) is not None:
        backend, config, _ = _load_gguf(gguf)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **config)
    if not (directory / "tokenizer.json").is_file():
        return _load_slow(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)


def _from_transformers(
    slow: "PreTrainedTokenizerBase", config: dict[str, Any], directory: Path, chat_options: ChatOptions
) -> Tokenizer:
    """Wrap a tokenizer from `transformers`; other arguments as in `_from_backend`."""
    special = {k: str(v) for k, v in slow.special_tokens_map.items() if isinstance(v, str)}
    if isinstance(backend := getattr(slow, "backend_tokenizer", None), tokenizers.Tokenizer):
        return _from_backend(backend, config | special, directory, chat_options)
    if chat_options.special_tokens_as_text:
        raise ConfigError(f"special_tokens_as_text needs a tokenizer.json, got none in {directory}; convert its files")
    return Tokenizer(
        lambda text, add_special: slow.encode(text, add_special_tokens=add_special),
        lambda ids, skip_special: slow.decode(ids, skip_special_tokens=skip_special),
        vocab_size=len(slow),
        special_tokens=special,
        special_ids=frozenset(slow.all_special_ids),
        bos_token_id=slow.bos_token_id,
        eos_token_ids=_eos_ids(slow.eos_token_id, directory),
        chat_template=_chat_templates(config, directory),
        chat_options=chat_options,
        vocabulary=slow.get_vocab,
        piece=slow.convert_ids_to_tokens,
        encode_pair=lambda a, b: slow(a, b)["input_ids"],
    )


def _load_slow(directory: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer in a directory with transformers' AutoTokenizer; ConfigError if it finds none."""
    with without_torch_advice():
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes over two seconds, needed only for old directories

    try:
        slow = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"no tokenizer in {directory}: looked for tokenizer.json, then for whatever transformers' AutoTokenizer "
            f"reads (tokenizer.model, vocab.json and merges.txt, vocab.txt, ...), which said: {_first_line(error)}"
        ) from error
    if not len(slow) > len(slow.all_special_ids):
        raise ConfigError(
            f"no tokenizer in {directory}: neither tokenizer.json nor a vocabulary file for AutoTokenizer"
        )
    return slow


def _gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that holds the tokenizer; None if there is none.

    It is the path itself, or the only GGUF model's file in a directory that has no `tokenizer*` files. For a sharded
    model it is the first shard, if that exists.
    """
    if path.suffix == ".gguf" and path.is_file():
        found = [path]
    else:
        found = list(path.glob("*.gguf")) if path.is_dir() and not any(path.glob("tokenizer*")) else []
    firsts = {file.with_name(_SHARD.sub(r"-00001-of-\1.gguf", file.name)) for file in found}
    return next((first if first.is_file() else found[0] for first in firsts), None) if len(firsts) == 1 else None


def _load_gguf(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any], list[int]]:
    """Load a GGUF file's tokenizer as `gguf_tokenizer.load` does; ConfigError if that fails in any way."""
    try:
        return gguf_tokenizer.load(file)
    except Exception as error:  # damaged files raise many types, the tokenizers library plain Exception
        raise ConfigError(
            f"{file} must have a tokenizer of a known kind, but: {type(error).__name__} {_first_line(error)}; "
            f"pass a directory as tokenizer=, or skip_tokenizer_init=True"
        ) from error


def _add_special_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add the configuration's added and special tokens to the backend, as `transformers` does."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder", {})
    missing = [_added_token(declared[i]) for i in sorted(declared, key=int) if declared[i]["content"] not in known]
    backend.add_tokens(missing)
    known |= {token.content: token for token in missing}
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    named = [*_special_token_texts(config).values(), *map(_text, extra.values() if isinstance(extra, dict) else extra)]
    for text in named:
        token = known.get(text) or tokenizers.AddedToken(text, special=True, normalized=False)
        if text not in known or not token.special:
            token.special = True
            backend.add_special_tokens([token])
            known[text] = token


def _special_token_texts(config: dict[str, Any]) -> dict[str, str]:
    """Return special token texts by name: the `*_token` entries, and those that the model adds for its templates."""
    named = {k: v for k, v in config.items() if k.endswith("_token")}
    texts = {k: _text(v) for k, v in named.items() if isinstance(v, str) or (isinstance(v, dict) and "content" in v)}
    extra = config.get("extra_special_tokens")
    return texts | ({k: _text(v) for k, v in extra.items()} if isinstance(extra, dict) else {})


def _text(token: str | dict[str, Any]) -> str:
    """Return the text of a token in a configuration, which may be an object with further fields."""
    return token if isinstance(token, str) else str(token["content"])


def _added_token(fields: dict[str, Any]) -> tokenizers.AddedToken:
    """Return an added token from its fields in tokenizer_config.json."""
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(fields["content"], **{name: fields[name] for name in names if name in fields})


def _eos_ids(tokenizer_eos: int | None, directory: Path, ends: Sequence[int] = ()) -> tuple[int, ...]:
    """Return all end-of-sequence ids without repetition: the given ones, then those in the model's JSON files."""
    listed: list[int] = [*([] if tokenizer_eos is None else [tokenizer_eos]), *ends]
    for file in ("generation_config.json", "config.json"):
        value = _read_json(directory / file).get("eos_token_id")
        if value is not None:
            listed += value if isinstance(value, list) else [value]
            if wrong := [each for each in listed if not isinstance(each, int)]:
                raise ConfigError(f"{directory / file}: eos_token_id must be ids, got {type(wrong[0]).__name__}")
            break
    return tuple(dict.fromkeys(listed))


def _chat_templates(config: dict[str, Any], directory: Path) -> dict[str, str]:
    """Return chat template sources by name, from files if there are any, otherwise from `tokenizer_config.json`."""
    files = {p.stem: p for p in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (main := directory / "chat_template.jinja").is_file():
        files["default"] = main
    if files:
        return {name: p.read_text(encoding="utf-8") for name, p in files.items()}
    found = config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template") or {}
    if isinstance(found, str):
        return {"default": found}
    return found if isinstance(found, dict) else {entry["name"]: entry["template"] for entry in found}


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} must hold JSON, but: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type's name if the message is empty."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(" :")
