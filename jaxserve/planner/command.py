"""`jaxserve plan`: reads the command line, prints the plan."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.planner.plan import make_plan
from jaxserve.planner.report import build_report, render
from jaxserve.planner.targets import find_target


def run_plan(args: argparse.Namespace, engine_options: Mapping[str, Any]) -> None:
    """Print what was asked for.

    Raises:
        ConfigError: the target, the model or an option is not one that can be planned with.
    """
    target = find_target(args.target)
    config = EngineConfig(model=args.model, tensor_parallel_size=target.num_chips, **engine_options)
    plan = make_plan(config, target, prompt_tokens=args.prompt_len, context_tokens=args.context_len)
    print(json.dumps(build_report(plan), indent=2) if args.json else render(plan))
