"""A call raises every message of docs/errors.md, and each says what must hold, what came and what to do."""

from __future__ import annotations

import functools
import importlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import generate
import pytest

ROOT = Path(__file__).parents[2]
TABLES = {
    "error_cases": ("ml_dtypes", "cupy"),
    "error_cases_torch": ("torch", "cupy"),
    "error_cases_jax": ("jax", "flax", "cupy"),
}
STATES = re.compile(r"\b(must|needs|takes|cannot|has no|is for|alone|is wrong|need|not initialized)\b")
SAYS_WHAT_CAME = re.compile(r"\b(cannot|has no|which|not initialized)\b")  # words of a text that also says what came


class Raised(NamedTuple):
    error: Exception
    entries: tuple[generate.Entry, ...]


@functools.cache
def entries() -> dict[tuple[str, int], generate.Entry]:
    return generate.entries()


def places(error: BaseException | None) -> Iterator[tuple[str, int]]:
    """Yield the places where an error and its causes were raised."""
    while error is not None:
        for frame, line in traceback.walk_tb(error.__traceback__):
            path = Path(frame.f_code.co_filename).resolve()
            if path.is_relative_to(ROOT):
                yield path.relative_to(ROOT).as_posix(), line
        error = error.__cause__ or error.__context__


@functools.cache
def raised(table: str) -> dict[str, Raised | None]:
    """Return what each row of a table raises, or None."""
    for package in TABLES[table]:
        pytest.importorskip(package)
    by_row: dict[str, Raised | None] = {}
    for name, call in importlib.import_module(table).ROWS.items():
        by_row[name] = None
        try:
            call()
        except Exception as error:
            by_row[name] = Raised(error, tuple(entries()[place] for place in places(error) if place in entries()))
    return by_row


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_every_row_raises_an_entry(table):
    wrong = {
        name: outcome and outcome.error for name, outcome in raised(table).items() if not (outcome and outcome.entries)
    }
    assert not wrong


@pytest.mark.slow
def test_every_entry_has_a_row():
    entries_raised = {
        entry for table in TABLES for outcome in raised(table).values() if outcome for entry in outcome.entries
    }
    missing = [
        f"{place[0]}:{place[1]}: {entry.must_hold}" for place, entry in entries().items() if entry not in entries_raised
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.slow
def test_every_entry_has_its_three_parts():
    wrong = [
        entry
        for entry in set(entries().values())
        if not STATES.search(entry.must_hold)
        or not (entry.came or SAYS_WHAT_CAME.search(entry.must_hold))
        or not (len(entry.remedy) > 3 or entry.remedy == "…")
    ]
    assert not wrong
