"""Every message of docs/errors.md is raised by a call, and says what must hold, what came and what to do."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import generate
import pytest

for library in ("torch", "jax", "flax", "ml_dtypes"):
    pytest.importorskip(library)

from error_cases import rows  # noqa: E402

ROOT = Path(__file__).parents[2]
ENTRIES = generate.entries()
STATES = re.compile(r"\b(must|needs|takes|cannot|has no|is for|alone|is wrong|need|not initialized)\b")
# Says by itself what came.
SELF_EVIDENT = re.compile(r"\b(cannot|has no|which|not initialized)\b")


class Raised(NamedTuple):
    error: Exception
    entries: tuple[generate.Entry, ...]


def places(error: BaseException | None) -> Iterator[tuple[str, int]]:
    """Where an error was raised, and those that it came of."""
    while error is not None:
        for frame, line in traceback.walk_tb(error.__traceback__):
            path = Path(frame.f_code.co_filename).resolve()
            if path.is_relative_to(ROOT):
                yield path.relative_to(ROOT).as_posix(), line
        error = error.__cause__ or error.__context__


@functools.cache
def raised(name: str) -> Raised:
    try:
        rows()[name]()
    except Exception as error:
        return Raised(error, tuple(ENTRIES[place] for place in places(error) if place in ENTRIES))
    pytest.fail(f"{name}: nothing was raised")


@pytest.mark.parametrize("name", rows())
def test_a_wrong_call_raises_an_entry(name):
    error, entries = raised(name)
    assert entries, f"{type(error).__name__}: {error}"


def test_every_entry_is_raised():
    found = {entry for name in rows() for entry in raised(name).entries}
    missing = [f"{place[0]}:{place[1]}: {entry.must_hold}" for place, entry in ENTRIES.items() if entry not in found]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("entry", sorted(set(ENTRIES.values())), ids=lambda entry: entry.must_hold[:60])
def test_an_entry_has_its_three_parts(entry):
    assert STATES.search(entry.must_hold)
    assert entry.came or SELF_EVIDENT.search(entry.must_hold)
    assert len(entry.remedy) > 3 or entry.remedy == "…"
