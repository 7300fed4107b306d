"""Options of XLA for the programs that tests compile themselves. The import needs the devices: jax is initialised."""

import jax

from jaxserve.execution.lowering import known_options
from tests.soon_compiled import unoptimized

UNOPTIMIZED = known_options(unoptimized(jax.devices()[0].device_kind))
