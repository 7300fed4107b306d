import jaxtyping
import pytest

from jaxserve.config import leave_tpus_alone

leave_tpus_alone()


@pytest.fixture
def without_jaxtyping():
    """Serving runs without annotations checked: what users see are the operation's own messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
