import jaxtyping
import pytest

from jaxserve.environment import leave_tpus_alone

leave_tpus_alone()


@pytest.fixture
def without_jaxtyping():
    """Disable checks of annotations, as when serving: users see the operation's own messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
