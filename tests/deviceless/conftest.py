import pytest

from pallas_kernels.deviceless import H200


@pytest.fixture(scope="session")
def h200():
    if (reason := H200.unavailable()) is not None:
        pytest.skip(reason)
    return H200
