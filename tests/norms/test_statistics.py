"""Two kernels do arithmetic of statistics.cuh in two ways, which give the same bits."""

from __future__ import annotations

import numpy
import pytest
from cpu_device import Launch, Machine, memory, missing, program, run
from cpu_functions import SMALL
from problems import problem

from cunorm.plan.plan import plan

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

ENTRY = r"""
void quotients(const float* sums, float* divided, float* multiplied) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  divided[i] = cunorm::quotient<COLS, true>(sums[i]);
  multiplied[i] = cunorm::quotient<COLS, false>(sums[i]);
}
const cpu::Kernel cpu::kernel = cpu::Erased<&quotients>::kernel;
"""


@pytest.mark.parametrize("cols", [3, 129, 5696, 65535])
def test_a_sum_is_divided_with_one_rounding(cols):
    """A division and products give the same bits. A row may meet either, by the number of rows."""
    (step, *_) = plan(problem("forward", 3, 136, "float32"), SMALL).steps
    text = Machine().text(step.spec)
    text = text[: text.rindex("const cpu::Kernel")] + ENTRY.replace("COLS", str(cols))
    generator = numpy.random.default_rng(0)
    sums = (generator.standard_normal(2**16) * 2.0 ** generator.integers(-60, 100, 2**16)).astype("float32")
    sums[:4] = 0, numpy.inf, -numpy.inf, numpy.nan
    arrays = {"sums": sums, "divided": numpy.empty_like(sums), "multiplied": numpy.empty_like(sums)}
    with memory(arrays) as pointers:
        run(program(text, "results"), Launch(64, 1, 1, 1024), "PPP", tuple(pointers.values()))
    expected = sums / numpy.float32(cols)
    numpy.testing.assert_array_equal(arrays["divided"], expected)
    numpy.testing.assert_array_equal(arrays["multiplied"], expected)
