"""Run unchanged OpenAI and Anthropic API clients against the server, and write a table of their checks.

    python scripts/client_table.py --work /tmp/clients --json scripts/results/clients.json
    python scripts/client_table.py --work /tmp/clients --clients openai anthropic

Every client gets a separate environment in the folder `--work`, which later runs reuse: some are large (guidellm
installs torch). Each runs the checks in its file in `clients/`. The server serves the embedded model with a chat
template that supports tools, or a random tiny model for clients that send pictures. Each client gets a line: its
version, passed checks out of all, and failures.
"""

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxserve import LLM, SamplingParams
from jaxserve.api.config import DEFAULT_MODEL
from jaxserve.api.embedded import embedded_model

CLIENTS = Path(__file__).parent / "clients"
ROOT = Path(__file__).parent.parent
# lm-eval moves white space at the end of a query to the answer.
QUERIES = ["import os\nimport", "def add(a, b):\n    return", "class Queue:\n    def", "for key, value in"]
CHOICES = [" sys", " a + b", " __init__(self):", " self.items():"]
TEMPLATE = """\
{%- if tools %}# tools:
{%- for tool in tools %} {{ tool | tojson }}{% endfor %}
# call one: <tool_call>
{"name": "...", "arguments": {...}}
</tool_call>
{% endif %}
{%- for m in messages %}# {{ m.role }}: {{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}
{% endfor %}{% if add_generation_prompt %}# assistant:{% endif %}"""


@dataclass(frozen=True)
class Client:
    """Client to run.

    Attributes:
        script: its file in `clients/`.
        packages: requirements for its environment.
        sees: True if it sends pictures, to a random tiny model that takes them.
    """

    script: str
    packages: tuple[str, ...]
    sees: bool = False


ALL = {
    "openai": Client("with_openai.py", ("openai>=3", "pydantic")),
    "openai-2": Client("with_openai.py", ("openai>=2,<3", "pydantic")),
    "openai-node": Client("with_openai_node.mjs", ("openai",)),
    "ai-sdk": Client(
        "with_ai_sdk.mjs", ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod")
    ),
    "anthropic": Client("with_anthropic.py", ("anthropic",)),
    "litellm": Client("with_litellm.py", ("litellm",)),
    "langchain-openai": Client("with_langchain.py", ("langchain-openai",)),
    "instructor": Client("with_instructor.py", ("instructor",)),
    "openai-agents": Client("with_openai_agents.py", ("openai-agents",)),
    "pydantic-ai": Client("with_pydantic_ai.py", ("pydantic-ai-slim[openai]",)),
    "llama-index": Client("with_llama_index.py", ("llama-index-llms-openai-like",)),
    "lm-eval": Client("with_lm_eval.py", ("lm-eval[api]", "transformers")),
    "pictures": Client("with_pictures.py", ("openai", "anthropic", "litellm", "langchain-openai"), sees=True),
    "gradio": Client("with_gradio.py", ("gradio", "openai", "pillow"), sees=True),
    "guidellm": Client("with_guidellm.py", ("torch==2.13.0", "guidellm")),
}


def command(name: str, client: Client, work: Path) -> tuple[list[str], Path]:
    """Create a client's environment; return the command that runs its file, and the folder to run it in."""
    folder = work / name
    if client.script.endswith(".mjs"):
        if not (folder / "node_modules").exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "package.json").write_text('{"private": true}\n')
            subprocess.run(["npm", "install", "--silent", *client.packages], cwd=folder, check=True)
        return ["node", str(CLIENTS / client.script)], folder
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for package in client.packages:  # one by one: installed versions are kept
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", package], check=True)
    return [str(python), str(CLIENTS / client.script)], folder


def write_model(directory: Path) -> None:
    """Write the embedded model, with a chat template that supports tools, and records for lm-eval."""
    shutil.copytree(embedded_model(DEFAULT_MODEL), directory, dirs_exist_ok=True)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    records = [{"query": query, "choices": CHOICES, "gold": index} for index, query in enumerate(QUERIES)]
    with LLM(str(directory), dtype="float32") as llm:
        for record in records:
            record["offline"] = [offline(llm, record["query"], choice) for choice in CHOICES]
            greedy = SamplingParams(temperature=0, max_tokens=16, stop=["\n\n\n"])
            assert llm.engine.tokenizer is not None
            ids = llm.engine.tokenizer.encode(record["query"], False)  # the encoding of lm-eval
            record["text"] = llm.generate([ids], greedy, use_tqdm=False)[0].outputs[0].text
            record["transformers"] = by_transformers(directory, record["query"])
    (directory / "task.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def write_vision_model(directory: Path) -> None:
    """Write a random tiny model that takes pictures."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from tests import picture_checkpoint  # noqa: PLC0415 - needs torch

    picture_checkpoint.write(directory)


def offline(llm: LLM, query: str, choice: str) -> float:
    """Return the log-likelihood of a text after another."""
    assert llm.engine.tokenizer is not None
    encode = llm.engine.tokenizer.encode
    ids, start = encode(query + choice, False), len(encode(query, False))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    tables = llm.generate([ids], params, use_tqdm=False)[0].prompt_logprobs
    assert tables is not None
    return sum(table[token].logprob for token, table in zip(ids[start:], tables[start:], strict=True) if table)


def by_transformers(directory: Path, query: str) -> list[float]:
    """Return the log-likelihoods of all choices from transformers, in float32."""
    import torch  # noqa: PLC0415 - slow, and an extra
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - as torch

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    start, found = len(tokenizer.encode(query, add_special_tokens=False)), []
    for choice in CHOICES:
        ids = tokenizer.encode(query + choice, add_special_tokens=False)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append(sum(float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))))
    return found


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Yield the URL of a server for this model, in a separate process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--served-model-name", "local", "--dtype", "float32"]
    argv = [sys.executable, "-m", "jaxserve", "serve", str(directory), "--port", str(port), *options]
    process = subprocess.Popen(argv)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5):
                break
            assert process.poll() is None, "the server has ended"
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        assert process.wait(60) == 0, "the server must end without an error"


def results(name: str, work: Path, url: str, directory: Path, *, is_verbose: bool) -> dict[str, Any]:
    """Return a client's version and checks."""
    argv, folder = command(name, ALL[name], work)
    done = subprocess.run(
        [*argv, url, "local", str(directory)], cwd=folder, capture_output=True, text=True, timeout=900, check=False
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        found = {"version": "?", "checks": {"all": "no results"}}
    if is_verbose and any(found["checks"].values()):
        print(done.stderr[-20_000:], file=sys.stderr)
    return found


def main() -> int:
    """Run the command line; 1 if a check has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the clients' environments")
    parser.add_argument("--clients", nargs="+", choices=list(ALL), default=list(ALL), metavar="NAME")
    parser.add_argument("--json", type=Path, help="file to write; clients that did not run keep their entries")
    parser.add_argument("--verbose", action="store_true", help="print what clients with failures write to stderr")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        found = json.loads(args.json.read_text())
    all_passed = True
    for write in (write_model, write_vision_model):
        names = [name for name in args.clients if ALL[name].sees == (write is write_vision_model)]
        if not names:
            continue
        with TemporaryDirectory() as temporary:
            directory = Path(temporary) / "model"
            write(directory)
            with serving(directory) as url:
                for name in names:
                    found[name] = entry = results(name, args.work.resolve(), url, directory, is_verbose=args.verbose)
                    failed = {check: error for check, error in entry["checks"].items() if error is not None}
                    all_passed &= not failed
                    print(f"{name} {entry['version']}: {len(entry['checks']) - len(failed)}/{len(entry['checks'])}")
                    for check, error in failed.items():
                        print(f"    {check}: {error}")
                    if args.json is not None:
                        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
