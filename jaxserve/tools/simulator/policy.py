"""Policies: step choosers from a user's module."""

import importlib
import subprocess
import sys

from jaxserve.errors import ConfigError
from jaxserve.tools.simulator.replica import Chooser


def load_policy(name: str) -> Chooser:
    """Return an instance of the chooser named `module:name`.

    Raises:
        ConfigError: there is no such class, it has no method `choose`, or its module imports jax: the engine's host
            threads cannot run such a policy.
    """
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"a policy must be MODULE:NAME, such as my_policies:ShortSteps, got {name!r}")
    # A new process: jax is loaded in this one, so only there does an import of jax show.
    code = "import importlib, sys; sys.path[:0] = ['']; importlib.import_module(sys.argv[1])"
    code += "; sys.exit('jax' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code, module_name], check=False, capture_output=True, text=True)
    if found.returncode and not found.stderr:
        raise ConfigError(f"a policy runs in the engine's host threads and must not import jax, but {module_name} does")
    if found.returncode:
        raise ConfigError(f"the policy {name} cannot be imported: {found.stderr.strip().splitlines()[-1]}")
    sys.path[:0] = [""]
    try:
        new_chooser = getattr(importlib.import_module(module_name), class_name, None)
    finally:
        sys.path.remove("")
    if not callable(getattr(new_chooser, "choose", None)):
        raise ConfigError(f"a policy must be a class with a method `choose(scheduler, now_s)`, got {name}")
    return new_chooser()  # type: ignore[misc]
