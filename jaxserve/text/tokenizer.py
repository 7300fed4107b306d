"""Tokenizer and incremental detokenizer. Imports neither jax nor torch.

`tokenizer.json` is read with the `tokenizers` library alone, whose import takes 0.03 s instead of over 2 s for
`transformers`. As in `transformers`, the special tokens of `tokenizer_config.json` and `special_tokens_map.json` are
added. `add_bos_token` and `add_eos_token` of `tokenizer_config.json` are ignored if there is a `tokenizer.json`, whose
post-processor defines the tokens around a prompt; transformers does the same from version 5 on. Directories without
`tokenizer.json` are loaded by `transformers.AutoTokenizer`, GGUF files by transformers' class for all fast tokenizers.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import tokenizers

from jaxserve.errors import ConfigError, RequestError
from jaxserve.outputs import GrowingText
from jaxserve.request import TokenIds
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.chat_template import ChatTemplate, Message, plain_messages
from jaxserve.text.stop_strings import StopStrings, compile_stop_strings
from jaxserve.text.token_stream import ByteStream, ByteTable, WindowStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG_TEXT_CHARS = 8192  # texts from this length on are tokenised without Python's global lock


class Tokenizer:
    """Tokenizer of a model, with its chat template and special tokens.

    Attributes:
        vocab_size: number of ids, added tokens included; the model's embedding may have more rows.
        special_tokens: name ("bos_token", ...) -> text; the variables of the chat template.
        special_ids: ids that `decode` leaves out when it skips special tokens.
        bos_token_id: first token of a sequence, if the model has one.
        eos_token_ids: ids that end a sequence: the tokenizer's, then those of `generation_config.json`.
        chat_template: template name -> Jinja source; "default" is the one for plain chats.
        token_text: token id -> its text by itself, special tokens included; decodes each id once.
        vocabulary: function that returns the id of each token.
        json_text: function that returns the text of `tokenizer.json`; None where the tokenizer has no such form.
    """

    def __init__(
        self,
        encode: Callable[[str, bool], TokenIds],
        decode: Callable[[Sequence[int], bool], str],
        *,
        vocab_size: int,
        special_tokens: dict[str, str],
        special_ids: frozenset[int],
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        chat_template: dict[str, str],
        byte_table: ByteTable | None = None,
        vocabulary: Callable[[], dict[str, int]] = dict,
        json_text: Callable[[], str] | None = None,
    ) -> None:
        self.vocabulary, self.json_text = vocabulary, json_text
        self._encode = encode
        self._decode = decode
        self.vocab_size = vocab_size
        self.special_tokens = special_tokens
        self.special_ids = special_ids
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.byte_table = byte_table
        self._compiled: dict[str, ChatTemplate] = {}
        self.token_text: Callable[[int], str] = _TokenTexts(decode).__getitem__

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends a sequence; the first if there are several."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> TokenIds:
        """Return the token ids of `text`.

        Args:
            text: text to tokenise.
            add_special_tokens: True to add the model's special tokens around a prompt, usually a BOS.
            max_tokens: limit of tokens, special ones included; only the last tokens of a longer text are kept.

        Raises:
            RequestError: `text` is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"a prompt must be valid Unicode, got a lone surrogate at index {error.start}") from None
        token_ids = self._encode(text, add_special_tokens)
        if max_tokens is None or len(token_ids) <= max_tokens:
            return token_ids
        plain = self._encode(text, False) if add_special_tokens else token_ids
        num_kept = max_tokens - (len(token_ids) - len(plain))
        if num_kept <= 0:  # no room for text between the special tokens
            return token_ids[-max_tokens:]
        starts = range(len(token_ids) - len(plain) + 1)
        start = next((i for i in starts if token_ids[i : i + len(plain)] == plain), 0)
        return token_ids[:start] + token_ids[start + len(plain) - num_kept :]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; invalid UTF-8 becomes U+FFFD, and ids outside the vocabulary are ignored."""
        return self._decode(token_ids, skip_special_tokens)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tokenize: Literal[False] = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tokenize: Literal[True],
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> TokenIds: ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tokenize: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str | TokenIds:
        """Render a chat with the model's template; return text, as `transformers` does with `tokenize=False`.

        Args:
            messages: dicts with a "role" and usually "content", a string or a list of {"type": "text"} parts,
                which are joined by newlines.
            add_generation_prompt: True to end with the header of the assistant's turn.
            tokenize: True to return the token ids of `encode(text, add_special_tokens=False)` instead.
            chat_template: Jinja source, or the name of one of the tokenizer's templates.
            tools: JSON schemas of functions that the model may call.
            variables: further variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: there is no template, it refuses the messages, or it has no such variable.
        """
        given = variables | ({"tools": tools} if tools else {}) | {"add_generation_prompt": add_generation_prompt}
        text = self.render_chat(messages, given, chat_template)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def render_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any], chat_template: str | None = None
    ) -> str:
        """Render a chat with the template's variables as a mapping, since their names may come from a request.

        Args:
            messages: messages as in `apply_chat_template`.
            variables: template variables, `tools` and `add_generation_prompt` (True by default) among them.
            chat_template: Jinja source, or the name of one of the tokenizer's templates.

        Raises:
            RequestError: there is no template, it refuses the messages, or it has no such variable.
        """
        template = self._template(self._template_source(chat_template, bool(variables.get("tools"))))
        if unknown := sorted(variables.keys() - template.variables - {"add_generation_prompt"}, key=str):
            raise RequestError(f"the chat template has no variables {unknown}; it has {sorted(template.variables)}")
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True} | self.special_tokens
        return template.render(defaults | dict(variables) | {"messages": plain_messages(messages)})

    def chat_variables(self, *, has_tools: bool) -> frozenset[str]:
        """Return the names that the chat template reads; RequestError if there is none."""
        return self._template(self._template_source(None, has_tools)).variables

    def _template_source(self, wanted: str | None, with_tools: bool) -> str:
        if wanted is not None:
            return self.chat_template.get(wanted, wanted)
        name = "tool_use" if with_tools and "tool_use" in self.chat_template else "default"
        if name not in self.chat_template:
            raise RequestError(
                "chat needs a chat template, and this tokenizer has none (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); pass chat_template=, or send the finished prompt as a completion"
            )
        return self.chat_template[name]

    def _template(self, source: str) -> ChatTemplate:
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source)
        return self._compiled[source]


class _TokenTexts(dict[int, str]):
    """Dict from token id to its text, special tokens included; decodes missing ids on first look-up."""

    def __init__(self, decode: Callable[[Sequence[int], bool], str]) -> None:
        self._decode = decode

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._decode([token_id], False)
        return text


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory or of a GGUF file, from local files only.

    Raises:
        ConfigError: there is no loadable tokenizer; the message names the expected files.
    """
    directory = Path(path)
    if (gguf := _gguf_file(directory)) is not None:
        found = _load_gguf(gguf)
        return _from_transformers(found, {"chat_template": found.chat_template}, directory)
    if not directory.is_dir():
        raise ConfigError(f"the tokenizer must be a local directory or a .gguf file, got {str(path)!r}")
    config = _read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older checkpoints have them in special_tokens_map.json
        config |= _read_json(directory / "special_tokens_map.json")
    file = directory / "tokenizer.json"
    if not file.is_file():
        return _from_transformers(_load_slow(directory), config, directory)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{file} must be readable by tokenizers {tokenizers.__version__}, but: {error}") from error
    _add_special_tokens(backend, config)
    return _from_backend(backend, config, directory)


def _from_backend(backend: tokenizers.Tokenizer, config: dict[str, Any], directory: Path) -> Tokenizer:
    # files may contain truncation and padding settings of training
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    special = _special_token_texts(config)
    return Tokenizer(
        partial(_encode, backend),
        lambda ids, skip_special: backend.decode(ids, skip_special_tokens=skip_special),
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        special_tokens=special,
        special_ids=frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special),
        bos_token_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        eos_token_ids=_eos_ids(
            backend.token_to_id(special["eos_token"]) if "eos_token" in special else None, directory
        ),
        chat_template=_chat_templates(config, directory),
        byte_table=ByteTable.of(backend),
        vocabulary=backend.get_vocab,
        json_text=backend.to_str,
    )


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> TokenIds:
    """Return the token ids of a text. Those of a long one are found while other threads run Python."""
    if len(text) < LONG_TEXT_CHARS:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids


def load_hf_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    """Load the same tokenizer as `load_tokenizer`, as an instance of `transformers`' class.

    If there is a `tokenizer.json`, it defines the tokenisation, as in `load_tokenizer`. AutoTokenizer could instead
    rebuild the tokenizer of a model family from its vocabulary.

    Raises:
        ConfigError: the directory has no tokenizer that transformers can load.
    """
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - over two seconds

    directory = Path(path)
    if (gguf := _gguf_file(directory)) is not None:
        return _load_gguf(gguf)
    if not (directory / "tokenizer.json").is_file():
        return _load_slow(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)


def _from_transformers(slow: "PreTrainedTokenizerBase", config: dict[str, Any], directory: Path) -> Tokenizer:
    special = {k: str(v) for k, v in slow.special_tokens_map.items() if isinstance(v, str)}
    if isinstance(backend := getattr(slow, "backend_tokenizer", None), tokenizers.Tokenizer):
        return _from_backend(backend, config | special, directory)
    return Tokenizer(
        lambda text, add_special: slow.encode(text, add_special_tokens=add_special),
        lambda ids, skip_special: slow.decode(ids, skip_special_tokens=skip_special),
        vocab_size=len(slow),
        special_tokens=special,
        special_ids=frozenset(slow.all_special_ids),
        bos_token_id=slow.bos_token_id,
        eos_token_ids=_eos_ids(slow.eos_token_id, directory),
        chat_template=_chat_templates(config, directory),
        vocabulary=slow.get_vocab,
    )


def _load_slow(directory: Path) -> "PreTrainedTokenizerBase":
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
    """Return the GGUF file that has the tokenizer: the path itself, or the only one of a directory without another."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    found = list(path.glob("*.gguf")) if path.is_dir() and not any(path.glob("tokenizer*")) else []
    return found[0] if len(found) == 1 else None


def _load_gguf(file: Path) -> "PreTrainedTokenizerBase":
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - over two seconds

    try:
        return PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except Exception as error:  # faults of the file are of any kind, those of the tokenizers library plain Exception
        raise ConfigError(
            f"{file} must have a tokenizer that transformers reads, which needs torch and gguf, but: "
            f"{type(error).__name__} {_first_line(error)}; pass a directory as tokenizer=, or skip_tokenizer_init=True"
        ) from error


def _add_special_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add the added and special tokens of the configuration to the backend, as `transformers` does."""
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
    """Return the `*_token` entries; besides the usual seven, models may define others for their templates."""
    named = {k: v for k, v in config.items() if k.endswith("_token")}
    texts = {k: _text(v) for k, v in named.items() if isinstance(v, str) or (isinstance(v, dict) and "content" in v)}
    extra = config.get("extra_special_tokens")
    return texts | ({k: _text(v) for k, v in extra.items()} if isinstance(extra, dict) else {})


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _added_token(fields: dict[str, Any]) -> tokenizers.AddedToken:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(fields["content"], **{name: fields[name] for name in names if name in fields})


def _eos_ids(tokenizer_eos: int | None, directory: Path) -> tuple[int, ...]:
    listed: list[int] = [] if tokenizer_eos is None else [tokenizer_eos]
    for file in ("generation_config.json", "config.json"):
        value = _read_json(directory / file).get("eos_token_id")
        if value is not None:
            listed += value if isinstance(value, list) else [value]
            break
    return tuple(dict.fromkeys(listed))


def _chat_templates(config: dict[str, Any], directory: Path) -> dict[str, str]:
    """Return the templates in files if there are any, else those of `tokenizer_config.json`."""
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
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file} must hold JSON, but: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(" :")


class Detokenizer:
    """Incremental detokenizer of one completion.

    Text is visible once it is final: incomplete UTF-8 is held back, and so is any text that may begin a stop string.
    The stop string that is complete first ends the text (of two complete at once, the longer), wherever token
    boundaries are. The cost of a token depends only on its own text, not on the length of the earlier text or the
    number of stop strings.

    Args:
        tokenizer: tokenizer of the model; with None, or with `params.detokenize=False`, there is no text.
        params: sampling parameters, of which stop, include_stop_str_in_output, min_tokens, skip_special_tokens,
            shown_special_ids and detokenize are used.
        prompt_token_ids: ids of the prompt, which the text continues: a leading space is kept that the decoder would
            strip at the start of a text.

    Attributes:
        visible: text so far, which only grows.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._stream = _token_stream(tokenizer, params, prompt_token_ids) if tokenizer and params.detokenize else None
        self._stops = compile_stop_strings(tuple(params.stop)) if params.stop else None
        self._state = StopStrings.START
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self.visible = GrowingText()
        self._held = ""  # suffix of the text that may begin a stop string
        self._found: str | None = None
        self._finished = False

    @property
    def text(self) -> str:
        """Copy of `visible` as a string."""
        return str(self.visible)

    def push(self, token_ids: Sequence[int]) -> str | None:
        """Append tokens; return the stop string once one is complete. Later tokens have no effect.

        Like the ids of `stop_token_ids`, a stop string counts from the token after `min_tokens` on.
        """
        for token_id in token_ids:
            if self._stream is None or self._finished:
                break
            self._num_tokens += 1
            self._extend(self._stream.push(token_id), self._num_tokens > self._min_tokens)
        return self._found

    def finish(self) -> str | None:
        """Make held text visible at the end of the output; return the stop string if that completes one."""
        if self._stream is not None and not self._finished:
            self._extend(self._stream.finish(), self._num_tokens > self._min_tokens)
            self.visible.append(self._held)
            self._finished = True
        return self._found

    def _extend(self, piece: str, may_stop: bool) -> None:
        if self._stops is None or not piece:
            self.visible.append(piece)
            return
        self._state, num_read, self._found = self._stops.scan(self._state, piece, may_stop)
        text = self._held + piece[:num_read]
        if self._found is not None:
            self.visible.append(text if self._keep_stop else text.removesuffix(self._found))
            self._held, self._finished = "", True
            return
        split = len(text) - self._stops.num_held(self._state)
        self.visible.append(text[:split])
        self._held = text[split:]


def _token_stream(
    tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]
) -> ByteStream | WindowStream:
    hidden: frozenset[int] = tokenizer.special_ids if params.skip_special_tokens else frozenset()
    if params.shown_special_ids:
        hidden -= frozenset(params.shown_special_ids)
    visible = (i for i in reversed(prompt_token_ids) if i not in hidden)
    context = list(itertools.islice(visible, 4))[::-1]
    if tokenizer.byte_table is not None:
        return ByteStream(tokenizer.byte_table, hidden, at_start=not context)
    skips = params.skip_special_tokens and not params.shown_special_ids
    return WindowStream(lambda ids: tokenizer.decode(ids, skips), hidden, context)
