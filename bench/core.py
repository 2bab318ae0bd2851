"""Speed of the core against the streaming roof, kernel time: `python -m bench.core [--out FILE.jsonl]`.

A line for each shape: the median time of one call, useful bytes a second, and the fraction of what the streaming
kernel of bench/roof.py reaches over the same buffers in the same run. dweight and dbias, and the kernel that adds up
their partials, are part of the backward pass.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys

import cupy

import cunorm
from bench.timing import median_seconds
from bench.workload import Workload
from cunorm import device
from cunorm.plan import plan
from cunorm.problem import Problem

SHAPES = [
    (1048576, 32),
    (1048576, 128),
    (262144, 256),
    (131072, 512),
    (16384, 1024),
    (65536, 1024),
    (16384, 2048),
    (16384, 4096),
    (16384, 8192),
    (16384, 16384),
    (8192, 32768),
    (4096, 65536),
    (2048, 131072),
    (1024, 262144),
    (512, 4096),
    (4096, 4096),
]


def environment() -> dict[str, object]:
    return {
        "gpu": device.current(0).name,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cupy": cupy.__version__,
        "cunorm": cunorm.__version__,
        "date": datetime.date.today().isoformat(),
        "command": "python -m bench.core " + " ".join(sys.argv[1:]),
    }


def measure(problem: Problem) -> dict[str, object]:
    solution = plan(problem, device.current(0))
    workload = Workload(problem)
    seconds = median_seconds(workload.calls(solution))
    roof = median_seconds(workload.roof())
    return {
        "op": problem.op,
        "direction": problem.direction,
        "dtype": problem.x,
        "rows": problem.rows,
        "cols": problem.cols,
        "tier": solution.tier,
        "microseconds": round(seconds * 1e6, 2),
        "gigabytes_per_second": round(problem.bytes_moved / seconds * 1e-9),
        "of_roof": round(roof / seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", default=["layer_norm", "rms_norm"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--out", help="file of JSON lines to write as well")
    arguments = parser.parse_args()
    lines = [environment()]
    print(json.dumps(lines[0]))
    for dtype in arguments.dtype:
        for op in arguments.op:
            for direction in ("forward", "backward"):
                for rows, cols in SHAPES:
                    result = measure(Problem.whole(op, direction, rows, cols, dtype, dtype))
                    cupy.get_default_memory_pool().free_all_blocks()
                    lines.append(result)
                    print("  ".join(f"{value!s:>10}" for value in result.values()), flush=True)
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
