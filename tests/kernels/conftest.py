import os

import jaxtyping
import pytest

from jaxserve.system.environment import leave_tpus_alone

leave_tpus_alone()

if os.environ.get("JAXSERVE_TEST_EMULATED"):  # instruction sets of other processors: pallas_kernels/README.md
    from tests.kernels.emulated import calls

    calls.install()


@pytest.fixture(autouse=True, scope="session")
def engines_compile_soon():
    """Import nothing of engines: there are none here, and the environment of the newer jax lacks what they need."""


@pytest.fixture
def without_jaxtyping():
    """Disable checks of annotations, as when serving: users see the operation's own messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
