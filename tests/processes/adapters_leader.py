"""One of several processes with LoRA adapters: `adapters_leader.py ADDRESS COUNT ID MODEL ADAPTERS OUTPUTS OPTIONS`.

ADAPTERS is a folder with adapters. All processes but the first one have another content in those named "differs", and
lack those named "missing". The first process writes tokens, and the errors of these two, to OUTPUTS.
"""

import json
import sys
from pathlib import Path
from typing import Any

from jaxserve import LLM, LoRARequest, RequestError, SamplingParams
from jaxserve.assembly import adapter_store
from jaxserve.distributed import processes
from jaxserve.weights.adapter_files import read_adapter
from tests.soon_compiled import few_programs, soon_compiled

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def generate(llm: LLM, adapters: Path, names: list[str | None], prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of a prompt for each adapter."""
    requests = [None if name is None else LoRARequest(name, 1, str(adapters / name)) for name in names]
    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, PARAMS, use_tqdm=False, lora_request=requests)
    return [output.outputs[0].token_ids for output in outputs]


def main() -> None:
    address, count, index, model, adapters, outputs, given = sys.argv[1:]
    options, prompts = json.loads(given), json.loads((Path(adapters) / "prompts.json").read_text())
    processes.initialize(address, int(count), int(index))

    def read_another(path: str) -> Any:
        others = {"differs": "a", "missing": "nowhere"}
        return read_adapter(Path(path).parent / others.get(Path(path).name, Path(path).name))

    if int(index):
        adapter_store.read_adapter = read_another  # type: ignore[assignment] # as if the directory were another
    with soon_compiled(), few_programs():
        llm = LLM(model, **options)  # only the first process returns
    names = ["a", None, "b", "c"]
    found: dict[str, Any] = {"first": generate(llm, Path(adapters), names, prompts)}
    for name in ("differs", "missing"):
        try:
            llm.load_lora(LoRARequest(name, 1, str(Path(adapters) / name)))
        except RequestError as error:
            found[name] = str(error)
    llm.unload_lora("a")
    found["again"] = generate(llm, Path(adapters), names, prompts)
    Path(outputs).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
