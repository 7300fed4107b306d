"""Facts of Hopper GPUs that no interpreter checks."""

import hypothesis.strategies as st
from hypothesis import assume, given

from jaxserve.pallas_kernels import hopper


@given(loading=st.integers(3, 9), num_loading=st.integers(1, 2), num_computing=st.integers(1, 4))
def test_a_thread_block_has_the_registers_that_its_threads_ask_for(loading, num_loading, num_computing):
    """A warpgroup that asks for more waits forever, as a kernel did on an H100 that asked for 48 and twice 232."""
    loading, num_threads = 8 * loading, 128 * (num_loading + num_computing)
    assume(loading <= 65536 // num_threads)
    computing = hopper.computing_registers(loading, num_loading=num_loading, num_computing=num_computing)
    at_start = 65536 // num_threads // 8 * 8  # rounded down, so that not all are there
    assert 128 * (num_loading * loading + num_computing * computing) <= num_threads * at_start
    assert at_start <= computing or computing == 256
    more = 128 * (num_loading * loading + num_computing * (computing + 8))
    assert computing == 256 or more > num_threads * at_start


def test_registers_of_known_kernels():
    """Numbers of threads that start with 168, 128 and 96 registers."""
    assert hopper.computing_registers(40, num_loading=1, num_computing=2) == 232
    assert hopper.computing_registers(64, num_loading=2, num_computing=2) == 192
    assert hopper.computing_registers(56, num_loading=1, num_computing=3) == 152
    assert hopper.computing_registers(32, num_loading=1, num_computing=4) == 112
