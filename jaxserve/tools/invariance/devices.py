"""Devices for the check."""

import jax

from jaxserve.system.environment import xla_flags


def provide_two_devices() -> None:
    """Divide a CPU into two virtual devices, unless XLA's flags set their number.

    Call this before jax's backend starts.
    """
    if "xla_force_host_platform_device_count" not in xla_flags():
        jax.config.update("jax_num_cpu_devices", 2)
