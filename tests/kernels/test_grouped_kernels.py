"""Grouped products of the kernels for GPUs and TPUs: values and races in the interpreters, and planted bugs."""

import interpreted
import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels.grouped_matmul import grouped_matmul
from tests.kernels.grouped_cases import GPU_CASES, TPU_CASES

needs_gpu_interpreter = pytest.mark.skipif(
    jax.default_backend() != "gpu" and jax.__version_info__ < (0, 11),
    reason="on a CPU GPU kernels need the interpreter of jax 0.11 and later",
)
QUICK = ["boundaries_inside_tiles"]
"""Case of the default run, which shows if the kernel does not run at all."""
ALIKE = ["one_group_has_all", "boundaries_at_tiles", "several_boundaries_in_a_tile"]
"""Cases that the GPU kernel does not distinguish from others."""


@pytest.mark.parametrize("case", TPU_CASES, ids=lambda case: case.name)
def test_xla_matches_the_reference(case):
    x, matrices, group_sizes, layer = case.arguments()
    y = grouped_matmul(x, matrices, group_sizes, layer=layer, dtype=case.result_dtype, backend="xla")
    rtol = 1e-5 if case.result_dtype == "float32" else 4e-3
    np.testing.assert_allclose(np.asarray(y, np.float32), case.expected(), rtol=rtol, atol=1e-4)


def check(case, found):
    assert found.error <= (1e-6 * case.num_inputs**0.5 if case.result_dtype == "float32" else 4e-3)
    assert found.is_finite
    assert not found.races


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.name in QUICK else pytest.mark.interpreter, id=case.name)
        for case in TPU_CASES
    ],
)
def test_the_tpu_kernel_matches_the_reference(case):
    check(case, interpreted.run_groups(case, "grouped_tpu"))


@pytest.mark.interpreter
@needs_gpu_interpreter
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.full if case.name in ALIKE else [], id=case.name) for case in GPU_CASES],
)
def test_the_gpu_kernel_matches_the_reference_without_races(case):
    check(case, interpreted.run_groups(case, "grouped_gpu"))


PLANTED = {  # kernels: {bug: (case, old code, new code)}
    "grouped_tpu": {
        "none": ("many_inputs", "", ""),
        "the last row of a group is not stored": ("one_token", "(row < end[visit])", "(row < end[visit] - 1)"),
        "rows of the group before are stored": ("boundaries_inside_tiles", "(row >= begin[visit]) & ", ""),
        "the matrices are those of the first layer": ("a_layer_among_others", "Visits(first + group,", "Visits(group,"),
        "sums begin with those of the visit before": (
            "many_inputs",
            "sums[...] = partial_sums",
            "sums[...] += partial_sums",
        ),
        "a group's last tile is not visited": (
            "several_boundaries_in_a_tile",
            "(leads + group_sizes + (tile_rows - 1)) // tile_rows",
            "(group_sizes + (tile_rows - 1)) // tile_rows",
        ),
    },
    "grouped_gpu": {
        "none": ("rows_of_many_tiles", "", ""),
        "blocks are loaded over those still in use": (
            "rows_of_many_tiles",
            "plgpu.barrier_wait(self.shared.free.at[slot])",
            "pass",
        ),
        "blocks are multiplied before they are there": (
            "rows_of_many_tiles",
            "            plgpu.barrier_wait(shared.ready.at[slot])\n",
            "",
        ),
        "one of two copies is waited for": ("rows_of_many_tiles", "num_arrivals=2,", "num_arrivals=1,"),
        "the last block is never given back": (
            "rows_of_many_tiles",
            "        plgpu.barrier_arrive(shared.free.at[self.slot(number, num_blocks - 1)])\n",
            "",
        ),
        "results leave before they are written": ("rows_of_many_tiles", "        plgpu.commit_smem()\n", ""),
        "results are overwritten while they leave": (
            "rows_of_many_tiles",
            "        plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n",
            "",
        ),
        "the row behind a group is stored": (
            "boundaries_inside_tiles",
            "jnp.clip(self.visits[visit, END] - base, 0, WARPGROUP_ROWS)",
            "jnp.clip(self.visits[visit, END] - base + 1, 0, WARPGROUP_ROWS)",
        ),
        "rows before a group are stored": (
            "boundaries_inside_tiles",
            "jnp.clip(self.visits[visit, BEGIN] - base, 0, WARPGROUP_ROWS)",
            "0 * base",
        ),
        "the second warpgroup stores the rows of the first": (
            "rows_of_many_tiles",
            "self.visits[visit, BASE] + warpgroup * WARPGROUP_ROWS, pl.ds",
            "self.visits[visit, BASE], pl.ds",
        ),
    },
}


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("kernels", "bug"),
    [
        pytest.param(kernels, bug, marks=needs_gpu_interpreter if kernels == "grouped_gpu" else [])
        for kernels, bugs in PLANTED.items()
        for bug in bugs
    ],
)
def test_a_planted_bug_is_caught(kernels, bug, tmp_path):
    """A bug shows as a wrong value, a race, an error, or a kernel that never ends; without one none of them occurs.

    The interpreter runs warpgroups on threads, whose order may hide a race; so a bug has several runs to show.
    """
    case, old, new = PLANTED[kernels][bug]
    if not old:
        assert not interpreted.goes_wrong(kernels, case, old, new, tmp_path)
        return
    assert len(interpreted.places_of(kernels, old)) == 1, "there is no such place any more"
    assert any(
        interpreted.goes_wrong(kernels, case, old, new, tmp_path) for _ in range(4 if kernels == "grouped_gpu" else 1)
    )
