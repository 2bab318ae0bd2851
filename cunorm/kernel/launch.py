"""Run a `Plan` on pointers. No other file launches kernels. Device `device_id` must be current.

Everything that stays the same from call to call is prepared once for each plan, device and thread. A call writes its
arguments into a block of memory whose addresses the driver has. On an H200's host a forward pass with ten arguments
takes 3.7 us, 3.2 of them in cuLaunchKernel; a cupy.cuda.Function takes 6.6.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from threading import get_ident
from typing import Protocol

from ..plan.spec import KernelSpec
from ..plan.steps import WORKSPACE, Matrix, Pointer, Step
from . import driver
from .compile import kernel
from .source import parameters

Write = Callable[..., None]
Launch = Callable[[int], None]
Pick = Callable[[Sequence[float]], Sequence[float | bytes]]  # bytes describe a matrix
NUMBERS = {"float32": "f4x", "float64": "d"}  # formats of the module `struct`, of 8 bytes each


class Arguments(Protocol):
    """The names of a call's arguments, in order."""

    @property
    def pointers(self) -> tuple[str, ...]: ...

    @property
    def scalars(self) -> tuple[str, ...]: ...


class Plan(Protocol):
    """A plan of any kernels, as far as it is read here."""

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
    """Launch the kernels of a plan.

    `arguments` are the pointers, in the order of `plan.problem.pointers`, with 0 for no array, and then the scalars.
    `stream` is a cudaStream_t. `workspace` has plan.workspace bytes at a multiple of 128, which are overwritten.
    """
    for write, launch, pick in prepared(plan, device_id, get_ident()):
        write(*(arguments if pick is None else pick((*arguments, workspace))))
        launch(stream)


def address(step: Step, device_id: int) -> int:
    """Return the address of the kernel of a launch, and load the kernel if need be.

    A launch must pass as many arguments as its kernel has parameters, else the driver reads memory beyond them.
    """
    arguments = len(step.pointers) + len(step.scalars) + len(step.integers)
    kernel_address, parameter_count = _loaded(step.spec, device_id)
    if arguments != parameter_count:
        raise RuntimeError(
            f"cunorm: a launch must pass as many arguments as its kernel has parameters, {parameter_count}; got "
            f"{arguments}. This is a fault of cunorm: please report it, with what was called. {step.spec}"
        )
    return kernel_address


@lru_cache(maxsize=4096)
def _loaded(spec: KernelSpec, device_id: int) -> tuple[int, int]:
    """Return (address of a kernel, number of its parameters). Plans that differ in their number of rows share it."""
    return kernel(spec, device_id).ptr, len(parameters(spec))


@lru_cache(maxsize=4 * 4096)  # for all threads
def prepared(plan: Plan, device_id: int, thread: int) -> tuple[tuple[Write, Launch, Pick | None], ...]:
    """Return the launches of a plan, and what picks the arguments of each from those of a call and the workspace.

    A launch without a pick takes all arguments of a call. Plans are compared by identity, which takes no time in a
    call. Each thread has launches of its own, as they hold the block that arguments are written to.
    """
    if len(plan.steps) == 1 and not plan.workspace:
        return ((*prepare(plan.steps[0], device_id), None),)
    names = (*plan.problem.pointers, *plan.problem.scalars, WORKSPACE)
    return tuple([(*prepare(step, device_id), _pick(names, step.pointers, step.scalars)) for step in plan.steps])


@lru_cache(maxsize=4096)
def _pick(names: tuple[str, ...], pointers: tuple[Pointer | Matrix, ...], scalars: tuple[str, ...]) -> Pick:
    """Return a function that picks the arguments of a launch from those of `names`."""
    places = {name: place for place, name in enumerate(names)}
    # Where each stands, its offset, and what describes a matrix.
    taken = [(places[name], offset, matrix) for name, offset, *matrix in pointers]
    taken += [(places[name], 0, []) for name in scalars]
    if any(matrix for _, _, matrix in taken):
        return lambda given: [
            driver.tensor_map(given[place] + offset, *matrix) if matrix else given[place] + offset
            for place, offset, matrix in taken
        ]
    if len(taken) > 1 and not any(offset for _, offset, _ in taken):
        return operator.itemgetter(*[place for place, _, _ in taken])  # 0.4 us less than a list
    return lambda given: [given[place] + offset for place, offset, _ in taken]


def context(device_id: int) -> int:
    """Return the CUcontext in which the kernels of a device are loaded, and make it current in this thread."""
    import cupy

    cupy.cuda.runtime.setDevice(device_id)
    return cupy.cuda.driver.ctxGetCurrent()


def prepare(step: Step, device_id: int) -> tuple[Write, Launch]:
    """Return `write(*pointers, *scalars)` and `launch(stream)`, for one thread at a time."""
    import cupy

    cupy.cuda.runtime.setDevice(device_id)  # a thread that has not yet called CUDA's runtime has no context
    function = address(step, device_id)
    sizes = [driver.TENSOR_MAP_BYTES if isinstance(pointer, Matrix) else 8 for pointer in step.pointers]
    formats = ["P" if size == 8 else f"{size}s" for size in sizes]
    changing = struct.Struct("".join(formats) + NUMBERS[step.spec.compute] * len(step.scalars))
    sizes += [8] * (len(step.scalars) + len(step.integers))
    count, places = len(sizes), list(accumulate(sizes, initial=0))
    # The address of each argument, then the arguments, which are copied.
    words = (ctypes.c_uint64 * (count + places[-1] // 8))()
    start = ctypes.addressof(words)
    struct.pack_into(f"{count}Q", words, 0, *(start + 8 * count + place for place in places[:-1]))
    words[len(words) - len(step.integers) :] = [number % 2**64 for number in step.integers]
    launch_kernel, threads, shared = cupy.cuda.driver.launchKernel, step.spec.threads, step.dynamic_shared
    write = partial(changing.pack_into, words, 8 * count)  # keeps `words` alive
    if step.begins_early:
        return write, driver.early_launch(function, step.grid, threads, shared, start)
    x, y, z = step.grid

    def launch(stream: int) -> None:
        launch_kernel(function, x, y, z, threads, 1, 1, shared, stream, start, 0)

    return write, launch
