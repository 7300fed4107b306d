"""Complete a text file of prompts, one per line, as a batch that can be killed and started again at any moment.

    python scripts/offline_batch.py prompts.txt results.jsonl --model DIR

`results.jsonl` has OpenAI's batch format; the requests are stored next to it. Run the same command again to continue.
"""

import argparse
import json
from pathlib import Path

from jaxserve import LLM, ConfigError
from jaxserve.openai.batch_files import run_batch
from jaxserve.openai.batch_paths import check_output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", metavar="DIR", help="Hugging Face checkpoint; the embedded default without")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    try:
        check_output(args.results, args.prompts)
        prompts = args.prompts.read_text().splitlines()
    except ConfigError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"prompts must be a file that can be read, got {args.prompts}: {error.strerror}")
    lines = []
    for number, prompt in enumerate(prompts, 1):
        body = {"prompt": prompt, "max_tokens": args.max_tokens}
        request = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(request) + "\n")
    requests = args.results.with_suffix(".requests.jsonl")
    if args.results.exists() and requests.exists() and requests.read_text() != "".join(lines):
        parser.error(f"{args.results} has the results of other prompts or options; choose another output file")
    requests.write_text("".join(lines))

    summary = run_batch(LLM(model=args.model), requests, args.results)
    print(f"{summary.num_records} records in {args.results}, {summary.num_errors} failed")


if __name__ == "__main__":
    main()
