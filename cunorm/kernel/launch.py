"""Run a `Plan` on pointers. No other file launches kernels. Device `device_id` must be current.

Everything that stays the same from call to call is prepared once for each plan, device and thread. A call writes its
arguments into a block of memory of the kernel and the thread, whose addresses the driver has. On an H200's host a
forward pass with ten arguments takes 3.7 us, 3.2 of them in cuLaunchKernel; a cupy.cuda.Function takes 6.6.
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
    call. Each thread has launches of its own, as they write their arguments to its memory.
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
    function, threads, shared = address(step, device_id), step.spec.threads, step.dynamic_shared
    sizes = tuple([driver.TENSOR_MAP_BYTES if isinstance(pointer, Matrix) else 8 for pointer in step.pointers])
    pack, start = _block(step.spec, sizes, len(step.scalars), len(step.integers), device_id, get_ident())
    write = partial(pack, *[number % 2**64 for number in step.integers])
    if step.begins_early:
        return write, driver.early_launch(function, step.grid, threads, shared, start)
    launch_kernel, (x, y, z) = cupy.cuda.driver.launchKernel, step.grid

    def launch(stream: int) -> None:
        launch_kernel(function, x, y, z, threads, 1, 1, shared, stream, start, 0)

    return write, launch


@lru_cache(maxsize=4096)
def _block(
    spec: KernelSpec, sizes: tuple[int, ...], scalars: int, integers: int, device_id: int, thread: int
) -> tuple[Write, int]:
    """Return `pack(*integers, *pointers, *scalars)`, and the address of the list of the addresses that it writes to.

    Pointers and matrices have `sizes` bytes. All launches of a kernel by a thread share the block of memory, as the
    driver copies the arguments when it is called.
    """
    formats = ["Q"] * integers + ["P" if size == 8 else f"{size}s" for size in sizes]
    arguments = struct.Struct("".join(formats) + NUMBERS[spec.compute] * scalars)
    all_sizes = [8] * integers + [*sizes] + [8] * scalars
    count, (*places, size) = len(all_sizes), accumulate(all_sizes, initial=0)
    words = (ctypes.c_uint64 * (count + size // 8))()
    start = ctypes.addressof(words)
    addresses = [start + 8 * count + place for place in places]
    struct.pack_into(f"{count}Q", words, 0, *addresses[integers:], *addresses[:integers])  # integers are the last ones
    return partial(arguments.pack_into, words, 8 * count), start  # which keeps `words` alive
