import pytest

from jaxserve.pallas_kernels.deviceless import H200, TPU_V6E
from jaxserve.system.environment import leave_tpus_alone
from jaxserve.tools.planner.targets import parse_target

leave_tpus_alone()


@pytest.fixture(scope="session")
def h200():
    if (reason := H200.unavailable()) is not None:
        pytest.skip(reason)
    return H200


@pytest.fixture(scope="session")
def tpu():
    if (reason := TPU_V6E.unavailable()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def targets():
    """Return a finder of targets by name that skips the test if nothing can be compiled for a target."""

    def find(name):
        target = parse_target(name)
        if (reason := target.sheet.chip.unavailable()) is not None:
            pytest.skip(reason)
        return target

    return find
