"""Runs a `Plan` on pointers: the only file that launches. Device `device_id` must be current.

Everything that stays the same from call to call is prepared once for each plan, device and thread; a call writes its
arguments into a block whose addresses the driver knows. On an H200's host 3.7 us, 3.2 of them cuLaunchKernel, where a
cupy.cuda.Function takes 6.6 with the ten arguments of the forward pass.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Protocol

from ..plan.spec import KernelSpec
from ..plan.steps import WORKSPACE, Step
from . import driver
from .compile import kernel
from .source import parameters

Write = Callable[..., None]
Launch = Callable[[int], None]
NUMBERS = {"float32": "f4x", "float64": "d"}  # as the module `struct` writes them, in 8 bytes each


class Arguments(Protocol):
    """The names of what a call is given, in order."""

    @property
    def pointers(self) -> tuple[str, ...]: ...

    @property
    def scalars(self) -> tuple[str, ...]: ...


class Plan(Protocol):
    """The fields that are read of a plan, of whatever kernels."""

    @property
    def problem(self) -> Arguments: ...

    @property
    def steps(self) -> tuple[Step, ...]: ...

    @property
    def workspace(self) -> int: ...


def run(
    plan: Plan,
    device_id: int,
    stream: int,
    arguments: Sequence[float],
    workspace: int = 0,
) -> None:
    """Arguments are the pointers, in the order of `plan.problem.pointers`, 0 where there is no array, then the scalars.

    `stream` is a cudaStream_t; `workspace` has plan.workspace bytes, at a multiple of 128, and what it held is lost.
    """
    found = prepared(plan, device_id)
    alone = found.alone
    if alone is not None:
        write, launch = alone
        write(*arguments)
        launch(stream)
        return
    given = (*arguments, workspace)
    for write, launch, picked in found.launches:
        write(*picked(given))
        launch(stream)


def address(step: Step, device_id: int) -> int:
    """Return the address of the kernel of a launch, which is loaded if it was not.

    A launch passes as many arguments as its kernel has parameters: of too few the driver would read what lies behind
    them.
    """
    given, (found, taken) = len(step.pointers) + len(step.scalars) + len(step.integers), _loaded(step.spec, device_id)
    if given != taken:
        raise RuntimeError(
            f"cunorm: a launch must pass as many arguments as its kernel has parameters, {taken}; got {given}. This is "
            f"a fault of cunorm: please report it, with what was called. {step.spec}"
        )
    return found


@lru_cache(maxsize=4096)
def _loaded(spec: KernelSpec, device_id: int) -> tuple[int, int]:
    """Return (address of a kernel, number of its parameters), once for plans that differ in their number of rows."""
    return kernel(spec, device_id).ptr, len(parameters(spec))


class Prepared(threading.local):
    """The launches of a plan. Python calls __init__ again in every thread: each has its own blocks of arguments."""

    def __init__(self, plan: Plan, device_id: int):
        ready = [prepare(step, device_id) for step in plan.steps]
        # The only launch, if it takes all that a call is given.
        self.alone = ready[0] if len(ready) == 1 and not plan.workspace else None
        names = (*plan.problem.pointers, *plan.problem.scalars, WORKSPACE)
        places = {name: place for place, name in enumerate(names)}

        def picker(step: Step) -> Callable[[Sequence[float]], Sequence[float]]:
            """Make a function that picks what one launch takes of all that a call is given."""
            taken = [(places[name], offset) for name, offset in step.pointers]
            taken += [(places[name], 0) for name in step.scalars]
            if len(taken) > 1 and not any(offset for _, offset in taken):
                return operator.itemgetter(*[place for place, _ in taken])  # 0.4 us less than a list
            return lambda given: [given[place] + offset for place, offset in taken]

        of_steps = zip(ready, plan.steps, strict=True)
        self.launches = () if self.alone else tuple((*one, picker(step)) for one, step in of_steps)


@lru_cache(maxsize=4096)
def prepared(plan: Plan, device_id: int) -> Prepared:
    """Plans are told apart by identity: no comparing on every call."""
    return Prepared(plan, device_id)


def context(device_id: int) -> int:
    """The CUcontext that the kernels of a device are loaded in, made the current one of this thread."""
    import cupy

    cupy.cuda.runtime.setDevice(device_id)
    return cupy.cuda.driver.ctxGetCurrent()


def prepare(step: Step, device_id: int) -> tuple[Write, Launch]:
    """`write(*pointers, *scalars)` and `launch(stream)`, for one thread at a time."""
    import cupy

    cupy.cuda.runtime.setDevice(device_id)  # a thread that never called CUDA's runtime has no context to launch in
    function = address(step, device_id)
    changing = struct.Struct("P" * len(step.pointers) + NUMBERS[step.spec.compute] * len(step.scalars))
    count = len(step.pointers) + len(step.scalars) + len(step.integers)
    words = (ctypes.c_uint64 * (2 * count))()  # where each argument is, then the arguments; the driver copies them
    start = ctypes.addressof(words)
    words[:count] = range(start + 8 * count, start + 16 * count, 8)
    words[2 * count - len(step.integers) :] = [number % 2**64 for number in step.integers]
    launch_kernel, threads, shared = cupy.cuda.driver.launchKernel, step.spec.threads, step.dynamic_shared
    write = partial(changing.pack_into, words, 8 * count)  # keeps `words` alive
    if step.begins_early:
        return write, driver.early_launch(function, step.grid, threads, shared, start)
    x, y, z = step.grid

    def launch(stream: int) -> None:
        launch_kernel(function, x, y, z, threads, 1, 1, shared, stream, start, 0)

    return write, launch
