"""A worker whose engine answers at once, or dies or fails when told: python fake_baseline.py NAME JOURNAL MOOD."""

import os
import sys
from pathlib import Path

from baselines import worker

NAME, JOURNAL, MOOD = sys.argv[1:]
DEATH_LEN = 2  # length of the request at which a moody engine dies


class Engine:
    note = "fake"
    num_warm_up = None

    def __init__(self, checkpoint: Path, cache_dir: Path) -> None:
        self.versions = {"fake": "1"}
        if MOOD == "dies at load":
            sys.exit("no memory")

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        print("chatter that must not be taken for an answer")
        with Path(JOURNAL).open("a") as journal:
            journal.write(f"{NAME} {prompts}\n")
        if DEATH_LEN in output_lens and MOOD == "dies":
            os._exit(3)
        if DEATH_LEN in output_lens and MOOD == "fails":
            raise ValueError("too short for me")
        return [[7] * (n - (MOOD == "cuts")) for n in output_lens]


sys.modules["baselines.with_fake"] = sys.modules["__main__"]
sys.argv[1:] = ["with_fake", "checkpoint", "cache", "{}"]
worker.main()
