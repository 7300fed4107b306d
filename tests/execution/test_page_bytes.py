"""Bytes of pages in host memory and on disk."""

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxserve.execution.page_bytes import PageBytes


def test_parts_that_are_not_divided_take_host_memory_for_each_device():
    mesh, shape = AbstractMesh((4,), ("tensor",)), (2, 16, 8)
    shardings = [NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, None, "tensor"), ())]
    divided, whole = (jax.ShapeDtypeStruct(shape, np.float32, sharding=each) for each in shardings)
    num_bytes = 4 * 2 * 16 * 8
    for parts, num_stored, num_in_host in (([divided], 1, 1), ([whole], 1, 4), ([divided, whole], 2, 5)):
        page = PageBytes(parts)
        assert (page.size, page.host_size) == (num_stored * num_bytes, num_in_host * num_bytes)
