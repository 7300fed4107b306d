"""llama.cpp through llama_decode: a custom loop gives each sequence its tokens, like the server's slots."""

import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np

from baselines.gguf_file import write_gguf


@dataclass
class _Sequence:
    """Tokens still to be fed, and tokens sampled so far."""

    feed: list[int]
    output_len: int
    num_fed: int = 0
    output: list[int] = field(default_factory=list)


class Engine:
    num_warm_up = 4

    def __init__(
        self,
        checkpoint: Path,
        cache_dir: Path,
        num_rows: int = 32,
        max_len: int = 1024,
        batch_size: int = 2048,
        file_type: str = "F32",
    ) -> None:
        sizes = f"{num_rows} sequences, batches of {batch_size}"
        self.note = f"llama_decode, {file_type}, {sizes}, float32 cache, no prefix sharing"
        self.versions = {"llama-cpp-python": llama_cpp.__version__}
        path = write_gguf(checkpoint, cache_dir / "llama.cpp" / "model.gguf")
        llama_cpp.llama_backend_init()
        if file_type != "F32":
            path = _quantized(path, file_type)
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._num_rows, self._max_len, self._batch_size = num_rows, max_len, batch_size
        self._context = llama_cpp.llama_init_from_model(self._model, self._context_params())
        self._batch = llama_cpp.llama_batch_init(batch_size, 0, 1)

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        sequences = [_Sequence(list(prompt), n) for prompt, n in zip(prompts, output_lens, strict=True)]
        longest = max(len(prompt) + n for prompt, n in zip(prompts, output_lens, strict=True))
        if longest > self._max_len:
            raise ValueError(
                f"prompt and output must fit max_len={self._max_len}, got {longest}; set llama.cpp.max_len"
            )
        waiting = deque(sequences)
        rows: dict[int, _Sequence] = {}
        while waiting or rows:
            for row in set(range(self._num_rows)) - rows.keys():
                if waiting:
                    rows[row] = waiting.popleft()
            self._step(rows)
        return [sequence.output for sequence in sequences]

    def _step(self, rows: dict[int, _Sequence]) -> None:
        """Run one batch: a token per decoding row, then as many prompt tokens as fit."""
        sampled: dict[int, int] = {}  # row -> position of its last token in the batch
        self._batch.n_tokens = 0
        for row in sorted(rows, key=lambda row: len(rows[row].feed)):
            sequence = rows[row]
            self._add(row, sequence)
            if not sequence.feed:
                sampled[row] = self._batch.n_tokens - 1
                self._batch.logits[sampled[row]] = 1
        if status := llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode must return 0, got {status}")
        for row, position in sampled.items():
            self._sample(rows, row, position)

    def _add(self, row: int, sequence: _Sequence) -> None:
        batch, chunk = self._batch, sequence.feed[: self._batch_size - self._batch.n_tokens]
        for token in chunk:
            i = batch.n_tokens
            batch.token[i], batch.pos[i], batch.logits[i] = token, sequence.num_fed, 0
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.n_tokens += 1
            sequence.num_fed += 1
        del sequence.feed[: len(chunk)]

    def _sample(self, rows: dict[int, _Sequence], row: int, position: int) -> None:
        logits = llama_cpp.llama_get_logits_ith(self._context, position)
        token = int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab_size,))))
        rows[row].output.append(token)
        rows[row].feed.append(token)
        if len(rows[row].output) == rows[row].output_len:
            del rows[row]
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), row, -1, -1)

    def _context_params(self) -> llama_cpp.llama_context_params:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = self._num_rows * self._max_len, self._num_rows
        params.n_batch, params.n_ubatch = self._batch_size, 512
        params.n_threads = params.n_threads_batch = os.cpu_count()
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        return params


def _quantized(path: Path, file_type: str) -> Path:
    """Return the file that llama.cpp quantises from another, with every matrix in one type, including the head."""
    out = path.with_name(f"{path.stem}-{file_type}.gguf")
    if not out.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type}")
        params.pure = True
        if status := llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), params):
            raise RuntimeError(f"llama_model_quantize must return 0, got {status}")
    return out
