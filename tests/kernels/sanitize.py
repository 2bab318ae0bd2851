"""compute-sanitizer over every tier of the kernels, on a machine with a GPU.

`python tests/kernels/sanitize.py [none memcheck racecheck initcheck synccheck] > bench/results/sanitize.json` writes a
table to standard error:
- none runs the same calls without a sanitizer, which compiles the kernels and shows that the calls are sound;
- memcheck finds accesses outside of arrays and misaligned ones;
- racecheck finds hazards in shared memory;
- initcheck finds device memory that is read before it is written;
- synccheck finds barriers that not all threads reach.

`python tests/kernels/sanitize.py compile 90` puts the kernels of these calls into the kernel cache, for compute
capability 9.0, on a machine without a GPU. There are some 2700, and a tool makes compiling slower still. NVRTC must
have the version that the machine with the GPU has.

racecheck does not follow asynchronous copies, and does not see the sums that the CTAs of a cluster send each other
(`st.async` to a mailbox counted by an mbarrier, threads.cuh); test_cpu_shapes.py looks for races there. synccheck runs
without clusters, so that long rows are streamed, because with clusters its own table of mbarriers overflows and the
launch fails. CuPy's own kernels are left out by name (`--kernel-name`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from cunorm.kernel.device import Device
from cunorm.plan.problem import ITEMSIZE
from cunorm.plan.spec import KernelSpec

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "norms"))
TOOLS = ("none", "memcheck", "racecheck", "initcheck", "synccheck")
SECONDS = 1500  # a tool may take so long
TAIL = 40  # so many lines of a log are kept
FOUND = 99  # the exit status of compute-sanitizer when it has findings
ROWS = 5
MARGINS = (0, 1)  # with a margin few rows run backward as many do
PARTS = 4  # processes for a dtype, because racecheck takes minutes for all lengths of bfloat16
SIDE_BY_SIDE = 16  # processes at once, because they wait for the compiler more than for the GPU


def main() -> int:
    if sys.argv[1:2] == ["run"]:
        return run(sys.argv[3], int(sys.argv[4]), clusters=sys.argv[2] != "synccheck")
    if sys.argv[1:2] == ["compile"]:
        return compile_kernels(int(sys.argv[2]))
    if shutil.which("compute-sanitizer") is None:
        print("sanitize: compute-sanitizer must be on the PATH; it comes with the CUDA toolkit.", file=sys.stderr)
        return 1
    with TemporaryDirectory() as folder:
        package = Path(folder)
        # The package is copied as it is installed, with the kernels inside.
        shutil.copytree(ROOT / "cunorm", package / "cunorm")
        shutil.copytree(ROOT / "kernels_cu", package / "cunorm" / "kernels_cu", dirs_exist_ok=True)
        wanted = list(product(sys.argv[1:] or TOOLS, ITEMSIZE))
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            parts = list(pool.map(lambda task: check(*task, package), product(wanted, range(PARTS))))
    results = [together(*task, parts[PARTS * i : PARTS * (i + 1)]) for i, task in enumerate(wanted)]
    print(f"{'tool':<12}{'dtype':<10}{'calls':>7}{'findings':>10}  status", file=sys.stderr)
    for result in results:
        print("{tool:<12}{dtype:<10}{calls!s:>7}{findings!s:>10}  {status}".format(**result), file=sys.stderr)
        if result["status"] != "ok":
            print("\n".join(f"    {line}" for line in result["log"]), file=sys.stderr)
    print(json.dumps({"date": f"{datetime.now(UTC):%Y-%m-%d}", "gpu": gpu(), "results": results}, indent=1))
    return 0 if all(result["status"] == "ok" for result in results) else 1


def check(wanted: tuple[str, str], part: int, package: Path) -> dict:
    """Return what one tool says of a part of one dtype. A tool that fails is no finding, and stops no other."""
    tool, dtype = wanted
    sanitizer = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=cunorm", "--error-exitcode", str(FOUND)]
    command = [] if tool == "none" else sanitizer
    try:
        done = subprocess.run(
            [*command, sys.executable, __file__, "run", tool, dtype, str(part)],
            cwd=package,
            env=os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        log, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        log, code = (error.stdout or b"").decode(errors="replace"), None
    said = verdict(tool, log, code)
    return {**said, "log": [] if said["status"] == "ok" else log.splitlines()[-TAIL:]}


def together(tool: str, dtype: str, parts: Sequence[dict]) -> dict:
    """Return the sums over all parts of a dtype, and every status and log that is not ok."""

    def total(name: str) -> int | None:
        said = [part[name] for part in parts if part[name] is not None]
        return sum(said) if said else None

    bad = [part for part in parts if part["status"] != "ok"]
    return {
        "tool": tool,
        "dtype": dtype,
        "calls": total("calls"),
        "findings": total("findings"),
        "status": ", ".join(dict.fromkeys(part["status"] for part in bad)) or "ok",
        "log": [line for part in bad for line in part["log"]],
    }


def verdict(tool: str, log: str, code: int | None) -> dict:
    """Return the findings of the summary and the calls of the line that `run` prints last, or None if it is missing."""
    summary = re.search(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards?)", log)
    calls = re.search(r"^calls: (\d+)$", log, re.MULTILINE)
    findings = int(summary[1] or summary[2]) if summary else None
    if code is None:
        status = f"stopped after {SECONDS} s"
    elif findings:
        status = "findings"
    elif code != 0 or calls is None or (findings is None and tool != "none"):
        status = f"the run itself failed, exit status {code}"
    else:
        status = "ok"
    return {"calls": calls and int(calls[1]), "findings": findings, "status": status}


def gpu() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0]


def run(dtype: str, part: int, *, clusters: bool) -> int:
    """Launch a part of the rows of one dtype on a GPU."""
    import cupy

    from cunorm.kernel import device

    def beside(size: int):
        """Allocate 16 bytes more and write them: kernels read them with the end of an array at an odd address, and
        drop them.
        """
        memory = pool.malloc(size + 16)
        cupy.cuda.runtime.memset(memory.ptr + size, 0, 16)
        return memory

    pool = cupy.get_default_memory_pool()
    cupy.cuda.set_allocator(beside)
    target = device.current(cupy.cuda.Device().id)
    if not clusters:
        target = replace(target, clusters=())
        device.current = lambda _: target
    calls = 0
    for count in launches(dtype, part, target, cupy.asarray):
        cupy.cuda.Device().synchronize()
        calls += count
    print(f"calls: {calls}", flush=True)
    return 0


def compile_kernels(arch: int) -> int:
    """Compile and keep all kernels that `run` launches, with clusters and without."""
    from cunorm.commands.compilation import compile_all, compiler
    from cunorm.kernel.device import KNOWN, known

    targets = *known(arch), replace(KNOWN[arch], clusters=())
    specs = set().union(*(kernels(*arguments) for arguments in product(ITEMSIZE, range(PARTS), targets)))
    with compiler(keep=True) as compile_one:
        faults = [
            kernel.fault for kernel in compile_all([(spec, arch) for spec in specs], compile_one) if kernel.used is None
        ]
    print(f"{len(specs)} kernels", *faults, sep="\n")
    return 1 if faults else 0


def kernels(dtype: str, part: int, target: Device) -> set[KernelSpec]:
    """Return the kernels that `run` launches, planned with the stand-in for CuPy."""
    import cpu_cupy
    import pytest

    specs = set()
    with pytest.MonkeyPatch.context() as patch:
        runs = cpu_cupy.play(patch, target, SimpleNamespace(run=lambda *plan, **arrays: None))
        for _ in launches(dtype, part, target, cpu_cupy.asarray):
            specs.update(step.spec for plan in runs.plans for step in plan.steps)
            runs.plans.clear()
    return specs


def launches(dtype: str, part: int, target: Device, asarray: Callable[..., Any]) -> Iterator[int]:
    """Call both passes of both norms, fused operations and a user's operation in every tier. Yield numbers of calls.

    In bfloat16 they have the shortest and longest rows of each tier, aligned and not. In the other dtypes only the
    width of a vector differs, so they have the longest rows, in turns aligned and not. `part` chooses a part of these.
    """
    import numpy
    from matrix import TABLES, lengths_of_tiers

    import cunorm
    from cunorm.call.numpy import numpy_dtype
    from cunorm.expression import silu

    gated = cunorm.fuse(
        "rms_norm",
        prologue=lambda x, shift, residual, factor: x * shift + factor * residual,
        epilogue=lambda xhat, z, weight, sharp: xhat * weight * silu(sharp * z),
    )
    random = numpy.random.default_rng(0)

    def arrays(cols: int, start: int):
        values = random.standard_normal((2, ROWS * cols + start)).astype(numpy_dtype("sanitize", dtype))
        x, dy = (asarray(row)[start:].reshape(ROWS, cols) for row in values)
        return x, dy, asarray(values[0, :cols])

    def plain(cols: int, start: int) -> int:
        x, dy, weight = arrays(cols, start)
        _, mean, rstd = cunorm.layer_norm_forward(x, None, weight, weight)
        _, rms_rstd = cunorm.rms_norm_forward(x, None, weight)
        for margin in MARGINS:
            cunorm.layer_norm_backward(dy, x, mean, rstd, weight, sm_margin=margin)
            cunorm.rms_norm_backward(dy, x, rms_rstd, weight, sm_margin=margin)
        return 2 + 2 * len(MARGINS)

    def fused(cols: int, start: int) -> int:
        x, dy, weight = arrays(cols, start)
        _, saved = cunorm.add_layer_norm.forward(x, dy, weight, weight)
        for margin in MARGINS:
            cunorm.add_layer_norm.backward(saved, dy, x, sm_margin=margin)
        _, saved = gated.forward(x, shift=weight, residual=dy, factor=0.5, z=x, weight=weight, sharp=2.0)
        try:
            gated.backward(saved, dy)
        except NotImplementedError:  # streamed rows have no gradient of a vector or number of the prologue
            gated.backward(saved, dy, wanted=("x", "residual", "z", "weight", "sharp"))
        return 3 + len(MARGINS)

    shortest, longest = set(), set()
    for direction in TABLES:
        for tier, lengths in lengths_of_tiers(direction, dtype, target).items():
            shortest.add(lengths[0])
            longest.add(lengths[-1] if tier else lengths[0])
    for index, cols in list(enumerate(sorted(longest)))[part::PARTS]:
        if dtype == "bfloat16":
            yield plain(cols, (index + 1) % 2)
        yield plain(cols, index % 2) + fused(cols, index % 2)
    others = product(sorted(shortest - longest) if dtype == "bfloat16" else (), (0, 1))
    for cols, start in list(others)[part::PARTS]:
        yield plain(cols, start)


if __name__ == "__main__":
    raise SystemExit(main())
