"""LayerNormLinear over the ranks of a group does as one process in float64.

The ranks are processes that run parallel_linear.py, with gloo on the CPU and with NCCL on two GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

if not torch.distributed.is_available():
    pytest.skip("this torch is without torch.distributed", allow_module_level=True)

import colwise  # noqa: E402
import parallel_overlaps  # noqa: E402
from parallel_cases import CASES, MANY  # noqa: E402
from parallel_linear import CHECKS  # noqa: E402
from parallel_mistakes import MISTAKES  # noqa: E402
from rank_pool import Pool  # noqa: E402

from cunorm.torch.linear import symmetric  # noqa: E402

PROGRAM = Path(__file__).parent / "parallel_linear.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def pool(request, tmp_path_factory):
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = 4 if request.param == "cpu" else 2
    pool = Pool(PROGRAM, ranks, tmp_path_factory.mktemp("ranks"), request.param)
    yield pool
    pool.close()


def assert_right(answers: list[str]) -> None:
    assert not any(answers), "\n".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(pool, case):
    assert_right(pool.ask(2, "case", case))


@pytest.mark.parametrize("case", MANY)
def test_four_ranks(pool, case):
    if pool.size < 4:
        pytest.skip("needs four ranks")
    assert_right(pool.ask(4, "case", case))


@pytest.mark.parametrize("check", CHECKS)
def test_rules(pool, check):
    assert_right(pool.ask(2, "check", check))


@pytest.mark.gpu
@pytest.mark.parametrize("check", parallel_overlaps.ON_GPUS)
def test_rules_on_gpus(pool, check):
    if pool.size == 4:
        pytest.skip("there are no streams on the CPU")
    assert_right(pool.ask(2, "check", check))


@pytest.mark.parametrize("check", ["overlaps_by_symmetric_memory", "values_and_gradients", *colwise.ON_FOUR])
def test_rules_on_four_ranks(pool, check):
    if pool.size < 4:
        pytest.skip("needs four ranks")
    assert_right(pool.ask(4, "check", check))


@pytest.fixture
def two(tmp_path):
    """Give a test ranks of its own, which it may leave waiting for each other."""
    pool = Pool(PROGRAM, 2, tmp_path, "cpu")
    yield pool
    pool.close()


def test_a_killed_rank(two):
    assert_right(two.ask(2, "case", "as it is"))
    two.end(1)
    assert_right(two.ask(1, "check", "dead"))


def test_where_hiding_an_exchange_wins():
    assert [symmetric.worth(size) for size in (symmetric.LEAST - 1, symmetric.LEAST)] == [False, True]


class Healthy:
    """Two ranks are asked for one mistake after the other, and replaced if they are not right again after one."""

    def __init__(self, tmp_path_factory):
        self._tmp_path_factory = tmp_path_factory
        self._pool: Pool | None = None

    def ask(self, mistake: str) -> list[str]:
        if self._pool is None:
            self._pool = Pool(PROGRAM, 2, self._tmp_path_factory.mktemp("ranks"), "cpu")
        answers = self._pool.ask(2, "mistake", mistake)
        if any(self._pool.ask(2, "case", "as it is")):
            self.close()
        return answers

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    ranks = Healthy(tmp_path_factory)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(healthy, mistake):
    answers = healthy.ask(mistake)
    assert any("AssertionError" in answer for answer in answers), answers
