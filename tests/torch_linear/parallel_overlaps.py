"""Checks of LayerNormLinear's ub_* flags over the ranks of a group, with files as symmetric memory on the CPU."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from parallel_cases import ALL_Z, OVERLAPS, Case, Whole, Z, make, raises, run
from torch import Tensor

from cunorm.torch import LayerNormLinear
from cunorm.torch.linear import exchange, symmetric


def overlaps_change_nothing(group: Any, device: str) -> None:
    """Each ub_* flag, and all at once, gives the bits that no flag gives.

    In 16 bits, a product in parts has the bits of the same parts without overlap. Collectives on a stream of their own
    give the bits of those on the current one.
    """
    flags = [{flag: True} for flag in OVERLAPS] + [dict.fromkeys(OVERLAPS[:3], True), dict.fromkeys(OVERLAPS, True)]
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    ranks = dist.get_world_size(group)

    def same(a: Tensor, b: Tensor) -> bool:
        """Return whether tensors are equal: more than two ranks may add up their terms in another order."""
        return torch.equal(a, b) if ranks == 2 else torch.allclose(a, b, 1e-12, 1e-12)

    def results(case: Case, **flags: bool) -> dict[str, Tensor]:
        part = Whole(case, ranks).part(dist.get_rank(group))
        passes = run(make(case, group, device, **flags), case, part, False, device)
        return {str(index): result for index, result in enumerate(passes.results)} | passes.gradients

    for options in ({}, Z, ALL_Z, {"bias": False, "keep_normalized": True}):
        case = Case(options, dtype=dtype, shape=(8, 2))
        plain = results(case)
        with mock.patch.object(exchange, "SECOND_STREAM_FROM", 0):
            beside = results(case)
        assert all(torch.equal(tensor, plain[name]) for name, tensor in beside.items())
        for chosen in flags:
            with mock.patch.object(symmetric, "worth", return_value=True):
                with mock.patch.object(symmetric, "exchange", return_value=None):  # exchange by torch.distributed
                    in_turn = results(case, **chosen)
                overlapped = results(case, **chosen)
            in_parts = {"ub_overlap_ag", "ub_overlap_rs_dgrad"} & chosen.keys()
            for name, tensor in overlapped.items():
                assert same(tensor, in_turn[name]), (chosen, name)
                if dtype is torch.float64 or not in_parts:
                    assert same(tensor, plain[name]), (chosen, name)


class Shared:
    """Stand in for torch's symmetric memory on the CPU: the ranks share files, and a signal is a byte."""

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self, size: int, group: Any, device: torch.device):
        Shared.counts[group.group_name] += 1
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._size, self._name = size, f"{sys.argv[3]}-{group.group_name}-{Shared.counts[group.group_name]}"
        signals = 2 * self._ranks**2
        # torch.from_file writes a zero to the first byte of a file that it makes larger, so all files get their size
        # before any rank begins to write.
        for name, length in ((f"{self._name}-{self._rank}", size), (f"{self._name}-signals", signals)):
            with open(name, "ab") as file:
                file.truncate(length)
        dist.barrier(group)
        self._signals = torch.from_file(f"{self._name}-signals", True, signals, dtype=torch.uint8)

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        whole = torch.from_file(f"{self._name}-{rank}", True, self._size, dtype=torch.uint8)
        return whole[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def put_signal(self, rank: int, channel: int, milliseconds: int) -> None:
        self._turn(channel, self._rank, rank, 0, 1, milliseconds)

    def wait_signal(self, rank: int, channel: int, milliseconds: int) -> None:
        self._turn(channel, rank, self._rank, 1, 0, milliseconds)

    def _turn(self, channel: int, sender: int, receiver: int, before: int, after: int, milliseconds: int) -> None:
        place = (channel * self._ranks + sender) * self._ranks + receiver
        end = time.monotonic() + milliseconds / 1000
        while self._signals[place] != before:
            if time.monotonic() > end:
                raise TimeoutError(f"channel {channel}, from rank {sender} to {receiver}")
            time.sleep(0)
        self._signals[place] = after


class AtOnce:
    """Stand in for a second stream: everything is done at once."""

    def __init__(self, device: torch.device):
        pass

    @contextlib.contextmanager
    def after_present(self):
        yield lambda: None

    def wait(self, mark: Any) -> None:
        pass


@contextlib.contextmanager
def symmetric_memory(device: str) -> Iterator[None]:
    """Use the exchange that GPUs have for matrices of any size, on the CPU through files."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(symmetric, "worth", return_value=True))
        if device == "cpu":
            stand_ins = {"allocate": lambda *a: (Shared(*a), None), "Side": AtOnce, "why_not": lambda *_: None}
            for name, stand_in in stand_ins.items():
                stack.enter_context(mock.patch.object(symmetric, name, stand_in))
            stack.enter_context(mock.patch.dict(symmetric._exchanges, clear=True))
        yield


def overlaps_by_symmetric_memory(group: Any, device: str) -> None:
    with symmetric_memory(device):
        overlaps_change_nothing(group, device)
        where = torch.device(device, None if device == "cpu" else dist.get_rank())
        assert isinstance(symmetric._exchanges[group.group_name, where][1], symmetric.SymmetricExchange)


SPARE: list[Any] = []  # groups of the first two ranks, for a check to destroy


def what_is_kept_is_bounded(group: Any, device: str) -> None:
    """A buffer keeps few views however many shapes it had, and exchanges of destroyed groups are not kept."""
    with symmetric_memory(device):
        where = torch.device(device, None if device == "cpu" else dist.get_rank())
        buffer = symmetric.Buffer(group, where)
        for rows in range(symmetric.SHAPES + 50, 0, -1):
            views = buffer.of_ranks((2 * rows, 1), torch.float32)
            assert [tuple(view.shape) for view in views] == [(2 * rows, 1)] * 2
        assert len(buffer._views) <= symmetric.SHAPES
        for other in SPARE:
            exchange.exchange_by_collectives(other.group_name)
            assert symmetric.exchange(other, where) is not None
            kept = [its.group for its in exchange._exchanges.values()]
            kept += [its_group for its_group, _ in symmetric._exchanges.values()]
            assert all(exchange.is_registered(kept_group) for kept_group in kept)
            dist.destroy_process_group(other)
        SPARE.clear()


def two_layers(group: Any, device: str, cols: int, outs: int, **flags: bool) -> Any:
    """Return a function of x that runs two layers one after the other and returns y and all gradients."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    torch.manual_seed(dist.get_rank(group))
    options = {"parallel_mode": "column", "tp_group": group, "sequence_parallel": True, "device": device}
    first = LayerNormLinear(cols, outs, params_dtype=dtype, **options, **flags)
    second = LayerNormLinear(first.out_features, outs, params_dtype=dtype, **options, **flags)

    def step(x: Tensor) -> list[Tensor]:
        y = second(first(x))
        return [y, *torch.autograd.grad(y.square().sum(), [x, *first.parameters(), *second.parameters()])]

    return step


KINDS = (dict.fromkeys(OVERLAPS[:3], True), {"ub_overlap_ag": True, "ub_overlap_rs_dgrad": True})


def delays(group: Any, device: str) -> None:
    """Results have the right bits though each rank is late at random.

    Calls of several sizes take turns, and what the buffers held before is overwritten.
    """
    rank, runs = dist.get_rank(group), 150 if device == "cuda" else 10
    random = numpy.random.default_rng(rank)
    with symmetric_memory(device):
        for flags in KINDS:
            step = two_layers(group, device, 64, 96, **flags)
            dtype = torch.bfloat16 if device == "cuda" else torch.float64
            inputs = [torch.randn(rows, 64).to(device, dtype).requires_grad_() for rows in (24, 256, 96)]
            with mock.patch.object(symmetric, "exchange", return_value=None):  # exchange by torch.distributed
                expected = [step(x) for x in inputs]
            for run in range(runs):
                known = symmetric._exchanges.get((group.group_name, inputs[0].device))
                for buffer in (known[1]._of_rows, known[1]._of_terms) if known else ():
                    for views in list(buffer._views.values())[:1]:
                        views[rank].fill_(math.nan)
                if random.random() < 0.5:
                    late(device, random.random())
                for result, expected_result in zip(step(inputs[run % 3]), expected[run % 3], strict=True):
                    assert torch.equal(result, expected_result), (flags, run)


def late(device: str, part: float) -> None:
    """Be late by `part` of half a millisecond."""
    if device == "cuda":
        torch.cuda._sleep(int(part * 1_000_000))
    else:
        time.sleep(part / 2000)


def graphs(group: Any, device: str) -> None:
    """A captured step replays between other calls, and a first call in a capture is refused."""
    rank = dist.get_rank(group)
    with symmetric_memory(device):
        for flags in KINDS:
            step = two_layers(group, device, 64, 96, **flags)
            x = torch.randn(96, 64).to(device, torch.bfloat16).requires_grad_()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step(x)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured = step(x)
            for run in range(20):
                with torch.no_grad():
                    x.copy_(torch.randn(96, 64, generator=torch.Generator().manual_seed(run + rank)))
                if (run + rank) % 2:
                    late(device, run / 20)
                graph.replay()
                replayed = [tensor.clone() for tensor in captured]
                for result, expected in zip(replayed, step(x), strict=True):
                    assert torch.equal(result, expected), (flags, run)
        step = two_layers(group, device, 128, 192, **KINDS[0])
        x = torch.randn(1024, 128).to(device, torch.bfloat16).requires_grad_()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            raises(RuntimeError, "must be made before a CUDA graph is captured", lambda: step(x))


def streams(group: Any, device: str) -> None:
    """Calls on the user's own streams, one after another, have the bits of a call on the default stream."""
    with symmetric_memory(device):
        for flags in KINDS:
            step = two_layers(group, device, 64, 96, **flags)
            x = torch.randn(96, 64).to(device, torch.bfloat16).requires_grad_()
            expected = step(x)
            for run in range(20):
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    results = step(x)
                torch.cuda.current_stream().wait_stream(stream)
                for result, expected_result in zip(results, expected, strict=True):
                    assert torch.equal(result, expected_result), (flags, run)


CHECKS = {
    check.__name__: check
    for check in (overlaps_change_nothing, overlaps_by_symmetric_memory, what_is_kept_is_bounded, delays)
}
ON_GPUS = {check.__name__: check for check in (graphs, streams)}
