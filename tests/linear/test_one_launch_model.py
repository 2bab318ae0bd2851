"""The schedule of one launch in every order: nothing is read too early, nothing overwritten, nobody waits for ever."""

from __future__ import annotations

import pytest
from one_launch_model import Model, ScheduleError, visit

SMALL = (Model(ctas=1, tiles=5), Model(ctas=1, stages=3, tiles=4), Model(consumers=1, stages=1, tiles=2))
LARGE = (Model(consumers=1, tiles=4), Model(stages=1, tiles=2))

MISTAKES = (
    "cluster_start",  # a CTA is sent something before it runs
    "empty",  # a stage is filled again though it is read
    "phase of empty",
    "a warp of empty",  # one warp gives a stage back for all
    "full",  # a stage is read before it has come
    "give back",  # nobody gives a stage back
    "known",  # z is made of statistics that have not come
    "a row",  # of one row nobody waits for the statistics
    "arrived",  # z is made of an x that has not come
    "meeting behind x",  # partial sums of a warp overwrite the x that another reads
    "x is read",  # those of another CTA do
    "meeting of partial sums",
    "second set",  # partial sums are overwritten while they are added up
    "summed",  # y is stored before all CTAs have brought their part
)


@pytest.mark.parametrize("model", SMALL, ids=str)
def test_every_order(model):
    assert visit(model) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("model", LARGE, ids=str)
def test_every_order_of_more(model):
    assert visit(model) > 500_000


@pytest.mark.parametrize("without", MISTAKES)
def test_mistakes_are_found(without):
    with pytest.raises(ScheduleError):
        visit(Model(ctas=2 if without in ("cluster_start", "x is read") else 1, consumers=2, without=without))
