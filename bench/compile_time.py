"""How long the kernels of a width compile, of two commits in turns: `python -m bench.compile_time --before DIR`.

DIR is a checkout of the earlier commit. A line is a norm, a direction and a width: milliseconds of the processor in
NVRTC for all kernels of the plan, the least of several turns. It needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from cupy_backends.cuda.libs import nvrtc

from bench.before_after import NAME, load
from bench.results import lines_to
from bench.suites import OPS

COLS = (768, 1600, 4096, 5120, 8192, 16384, 65536)


@contextlib.contextmanager
def timed() -> Iterator[list[float]]:
    """A list that gets the seconds of each program that NVRTC compiles meanwhile."""
    seconds: list[float] = []
    compile_program = nvrtc.compileProgram

    def compile_timed(program: int, options: tuple[str, ...]) -> None:
        start = time.process_time()
        compile_program(program, options)
        seconds.append(time.process_time() - start)

    nvrtc.compileProgram = compile_timed
    try:
        yield seconds
    finally:
        nvrtc.compileProgram = compile_program


def of_plan(package: str, op: str, direction: str, cols: int, arch: int) -> float:
    """Milliseconds for the kernels of bfloat16 rows beside weights of bfloat16."""
    command = ["compile", "--show", "ptxas", "--op", op, "--direction", direction, "--dtype", "bfloat16"]
    main = importlib.import_module(f"{package}.__main__").main
    with timed() as seconds, contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([*command, "--cols", str(cols), "--arch", str(arch)])
    if not seconds:
        raise RuntimeError(f"{package} compiled nothing for {op} {direction} of {cols} columns")
    return 1000 * sum(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--cols", type=int, nargs="+", default=COLS)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    load(arguments.before)
    cases = [(op, direction, cols) for cols in arguments.cols for op in OPS for direction in ("forward", "backward")]
    least: defaultdict[tuple, float] = defaultdict(lambda: float("inf"))
    for _ in range(arguments.turns):
        for case in cases:
            for package in (NAME, "cunorm"):
                least[package, case] = min(least[package, case], of_plan(package, *case, arguments.arch))
    with lines_to(arguments.out) as write:
        for op, direction, cols in cases:
            before, after = (least[package, (op, direction, cols)] for package in (NAME, "cunorm"))
            line = {"op": op, "direction": direction, "cols": cols, "arch": arguments.arch}
            write(**line, before_ms=round(before), after_ms=round(after), ratio=round(after / before, 3))
    before, after = (sum(least[package, case] for case in cases) for package in (NAME, "cunorm"))
    print(f"{len(cases)} plans: {before:.0f} -> {after:.0f} ms ({after / before:.3f})")


if __name__ == "__main__":
    main()
