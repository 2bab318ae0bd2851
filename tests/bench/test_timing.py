"""All contenders have a place in each turn, not always the same, and one that fails leaves the others alone."""

from __future__ import annotations

import itertools

from bench.timing import TURNS, in_turns


def test_everyone_has_a_place_in_every_turn_and_not_always_the_same():
    order: list[int] = []
    in_turns([lambda which=which: order.append(which) or 1.0 for which in range(4)], seconds=0)
    turns = [order[start : start + 4] for start in range(0, len(order), 4)]
    assert len(turns) == 1 + TURNS[0]  # a warm-up, and the least number of turns
    assert all(sorted(turn) == [0, 1, 2, 3] for turn in turns)
    assert len({turn[0] for turn in turns}) > 2
    followed = {pair for turn in turns for pair in itertools.pairwise(turn)}
    assert len(followed) > 6, "the same ones follow each other"


def test_one_that_fails_leaves_the_others_alone():
    def fails() -> float:
        raise RuntimeError("lost")

    first, failed, last = in_turns([lambda: 1.0, fails, lambda: 3.0], seconds=0)
    assert isinstance(failed, RuntimeError)
    assert [first, last] == [(1.0, 1.0, 1.0), (3.0, 3.0, 3.0)]
