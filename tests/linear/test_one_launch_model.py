"""In every order of one launch's steps nothing is read too early, nothing is overwritten, and nobody waits for ever."""

from __future__ import annotations

import pytest
from one_launch_model import Model, ScheduleError, visit

SMALL = (Model(ctas=1, tiles=5), Model(ctas=1, stages=3, tiles=4), Model(consumers=1, stages=1, tiles=2))
LARGE = (Model(consumers=1, tiles=3), Model(stages=1, tiles=2))

MISTAKES = (
    "cluster_start",  # something is sent to a CTA before it runs
    "empty",  # a stage is filled again while it is still read
    "phase of empty",  # a producer waits for the wrong phase
    "a warp of empty",  # one warp gives a stage back for all warps
    "full",  # a stage is read before it has come
    "give back",  # nobody gives a stage back
    "known",  # z is computed before the statistics have come
    "a row",  # nobody waits for the statistics of one row
    "arrived",  # z is computed before x has come
    "meeting behind x",  # partial sums of a warp overwrite the x that another warp reads
    "x is read",  # partial sums of another CTA overwrite it
    "meeting of partial sums",  # partial sums are added before all warps have written them
    "second set",  # partial sums are overwritten while they are added up
    "summed",  # y is stored before all CTAs have brought their part
)


@pytest.mark.parametrize("model", SMALL, ids=str)
def test_every_order(model):
    assert visit(model) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("model", LARGE, ids=str)
def test_every_order_of_more(model):
    assert visit(model) > 300_000


@pytest.mark.parametrize("without", MISTAKES)
def test_mistakes_are_found(without):
    with pytest.raises(ScheduleError):
        visit(Model(ctas=2 if without in ("cluster_start", "x is read") else 1, consumers=2, without=without))
