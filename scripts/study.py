"""Run a study of policies in virtual time, with the engine's own scheduler.

    python scripts/study.py stability --json scripts/results/stability.json
    python scripts/study.py NAME --help

Each name is a module in scripts/studies: stability, autoscaling, decentralised, disaggregation, diurnal,
energy, learned. Each prints its rows as they come; --json writes them.
"""

import importlib
import sys

NAMES = ("stability", "autoscaling", "decentralised", "disaggregation", "diurnal", "energy", "learned")


def main(argv: list[str]) -> None:
    """Run the study that the first argument names."""
    if not argv or argv[0] not in NAMES:
        sys.exit(f"{(__doc__ or '').strip()}")
    importlib.import_module(f"studies.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
