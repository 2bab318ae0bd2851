"""Write down what a change of structure must leave as it is, and compare two such files. It needs no GPU.

    python -m bench.freeze write FILE [--parts plans code results outside errors] [--code-of N]
    python -m bench.freeze compare OLD NEW

A line of a file is one fact: `{"part", "group", "key", ...}` and digests. A fact has the name of a problem, a call or a
public object, and not of a module, so that two commits can be compared whatever their modules are called.

plans    The launches of every problem of the bench's suites, of the compile matrix, and of drawn operations, on every
         architecture: `text` is a digest of the kernels' texts without #line, `launch` of grids, shared memory, the
         order of arguments and the workspace.
code     The machine code of one in N kernels by NVRTC, names of symbols dropped: a rename changes `text` alone.
results  y, s, mean, rstd and gradients of calls on the CPU's stand-in for a GPU, to the bit.
outside  Signatures, operators' schemas, keys of state dicts, and what torch and JAX keep for a backward pass.
errors   The texts of the errors that the tests of bad input raise.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib
import inspect
import json
import random
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
PARTS = ("plans", "code", "results", "outside", "errors")
DRAWN = 400  # operations for each device
SHOWN = 5  # changed facts of a group that are printed

Fact = dict[str, Any]


def digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("file", type=Path)
    write.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    write.add_argument("--code-of", type=int, default=40, metavar="N", help="compile one in N kernels")
    compare = commands.add_parser("compare")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return compared(arguments.old, arguments.new)
    sys.path[:0] = [str(TESTS), *map(str, TESTS.iterdir())]  # the stand-in and its helpers
    facts = {
        "plans": plans,
        "code": lambda: machine_code(arguments.code_of),
        "results": results,
        "outside": outside,
        "errors": errors,
    }
    with gzip.open(arguments.file, "wt") as file:
        for part in arguments.parts:
            lines = [json.dumps({"part": part, **fact}) for fact in facts[part]()]
            print(*lines, sep="\n", file=file)
            print(f"{part}: {len(lines)} facts", file=sys.stderr)
    return 0


def compared(old: Path, new: Path) -> int:
    """Print, for each group, how many facts are equal and which are not, and return 1 if any is not."""
    before, after = read(old), read(new)
    groups: dict[tuple[str, str], Counter[str]] = {}
    changed: dict[tuple[str, str], list[str]] = {}
    for key in before | after:
        group, fact, now = key[:2], before.get(key), after.get(key)
        count = groups.setdefault(group, Counter())
        if fact is None or now is None:
            differs = ["absent before" if fact is None else "absent now"]
        else:
            differs = [name for name in fact if fact[name] != now.get(name)]
        for name in differs or ["equal"]:
            count[name] += 1
        if differs:
            changed.setdefault(group, []).append(f"{key[2]}: {', '.join(differs)}")
    for group, count in groups.items():
        print(" ".join(group), dict(count))
        for line in changed.get(group, [])[:SHOWN]:
            print("   ", line)
    return 1 if changed else 0


def read(path: Path) -> dict[tuple[str, str, str], Fact]:
    facts: dict[tuple[str, str, str], Fact] = {}
    with gzip.open(path, "rt") as file:
        for line in file:
            fact = json.loads(line)
            key = fact.pop("part"), fact.pop("group"), fact.pop("key")
            assert key not in facts, key
            facts[key] = fact
    return facts


# Plans.


def plans() -> Iterator[Fact]:
    """Return a fact for each problem and device."""
    for group, key, solution in solutions():
        if solution is None:
            yield {"group": group, "key": key, "text": "refused", "launch": "refused"}
            continue
        yield {
            "group": group,
            "key": key,
            "text": digest([text_of(step.spec) for step in solution.steps]),
            "launch": digest([launch_of(step, solution) for step in solution.steps], solution.workspace),
        }


def launch_of(step: Any, solution: Any) -> tuple:
    order = positions(step.pointers, solution), len(step.scalars), step.integers
    return step.grid, step.spec.threads, step.spec.cluster, step.dynamic_shared, step.begins_early, *order


def positions(pointers: Iterable[Any], solution: Any) -> list[tuple[int, int]]:
    """Return which argument of the call each pointer of a launch is, whatever its name, or -1 for the workspace."""
    places = {name: place for place, name in enumerate(solution.problem.pointers)}
    return [(places.get(pointer.name, -1), pointer.offset) for pointer in pointers]


_texts: dict[Any, str] = {}


def text_of(spec: Any) -> str:
    """Return the digest of a kernel's text without #line lines and comments."""
    if spec not in _texts:
        from cunorm.kernel.source import source

        text = re.sub(r"^#line .*\n|//.*$", "", source(spec), flags=re.MULTILINE)
        _texts[spec] = digest([line.strip() for line in text.splitlines() if line.strip()])
    return _texts[spec]


def solutions() -> Iterator[tuple[str, str, Any]]:
    """Return (group, key, plan or None if it is refused) for every problem on every device."""
    import matrix
    from problems import DEVICES

    from cunorm.plan.plan import plan

    drawn = list(drawn_problems())
    for device in DEVICES.values():
        groups = {
            "suites": suite_problems() if device.arch == 90 else [],
            "matrix": matrix.covering(device),
            "operations": [
                *matrix.named_fusions(),
                *matrix.numbers_of_rows(),
                *matrix.fused_float8(),
            ],
            "drawn": drawn,
        }
        for group, problems in groups.items():
            for number, problem in enumerate(problems):
                try:
                    solution = plan(problem, device)
                except NotImplementedError:
                    solution = None
                yield f"{device.name}, {group}", f"{number}: {described(problem)}", solution
        for number, solution in enumerate(matrix.casts(device)):
            yield f"{device.name}, casts", f"{number}", solution


def described(problem: Any) -> str:
    arrays = " ".join(f"{operand.kind}:{operand.dtype}" for operand in problem.operands)
    return f"{problem.operation.norm} {problem.direction} {problem.rows} x {problem.cols} {arrays}"


def suite_problems() -> Iterator[Any]:
    """Return the problems of the bench's suites, each once, where views count as matrices."""
    from bench.suites import SUITES
    from cunorm.plan.plain_problems import whole

    cases = [case for make, _ in SUITES.values() for case in make()]
    keys = dict.fromkeys((c.op, c.direction, c.rows, c.cols, c.dtype, c.weight_dtype) for c in cases)
    return (whole(*key) for key in keys)


def drawn_problems() -> Iterator[Any]:
    """Return fused, FP8, odd, strided and mixed-dtype operations, drawn by a fixed seed."""
    from cunorm.expression import trace
    from cunorm.operation import Operation
    from cunorm.plan.plain_problems import float8_problem, plain
    from cunorm.plan.problem import ITEMSIZE, RowStrides, backward_problem, forward_problem

    draw = random.Random(0)
    added = trace(lambda x, residual: x + residual, role="prologue")
    scaled = trace(lambda xhat, weight, z: xhat * weight * z)
    for number in range(DRAWN):
        rows = draw.choice((1, 7, 60, 500, 2000, 16384, 2**20))
        cols = int(2 ** draw.uniform(4, 18)) // (16 if number % 2 else 1) * (16 if number % 2 else 1) or 16
        norm, direction = draw.choice(("layer_norm", "rms_norm")), draw.choice(("forward", "backward"))
        x, y, weight = (draw.choice(tuple(ITEMSIZE)) for _ in range(3))
        margin, aligned = draw.choice((0, 0, 4)), draw.random() < 0.7
        wide = RowStrides(cols + draw.choice((0, 1, 8)))
        if draw.random() < 0.25:
            wide = RowStrides(cols, rows * cols + 16, max(1, rows // 2))
        if number % 4 == 0:
            x = "bfloat16" if x == "float64" else x
            granularity = draw.choice(("row", 128, "tensor"))
            format8 = draw.choice(("float8_e4m3fn", "float8_e5m2"))
            yield float8_problem(norm, rows, cols, x, x, y8=format8, granularity=granularity, x_rows=wide.row)
        elif number % 4 == 1:
            wanted = ("x", "weight") if norm == "rms_norm" else ("x", "weight", "bias")
            bias = weight if norm == "layer_norm" and direction == "forward" else None
            strides = {"x": wide}
            shared: dict[str, Any] = {"y": y, "strides": strides, "sm_margin": margin, "aligned": aligned}
            yield plain(norm, direction, rows, cols, x, weight, bias, wanted=wanted, **shared)
        else:
            operation = Operation(norm, scaled, added, ("y", "s"))
            kinds = {"residual": "full", "z": "full"}
            dtypes = {"x": x, "s": x, "y": y, "dy": y, "ds": x, "residual": x, "weight": weight, "z": y}
            shared = {"kinds": kinds, "strides": {"z": wide}, "sm_margin": margin, "aligned": aligned}
            if direction == "forward":
                yield forward_problem(operation, rows, cols, dtypes, **shared)
            else:
                yield backward_problem(operation, rows, cols, dtypes, ("x", "residual", "weight", "z"), **shared)


# Machine code.


def machine_code(one_in: int) -> Iterator[Fact]:
    """Return a fact for each kernel that is compiled, which a digest of its problem and place decides."""
    from problems import DEVICES

    work: dict[tuple[Any, int], tuple[str, str]] = {}
    archs = {device.name: device.arch for device in DEVICES.values()}
    for group, key, solution in solutions():
        for place, step in enumerate(solution.steps if solution else ()):
            if int(digest(group, key, place), 16) % one_in == 0:
                work.setdefault((step.spec, archs[group.partition(",")[0]]), (group, f"{key} launch {place}"))
    with ThreadPoolExecutor(2) as pool:
        for (group, key), code in zip(work.values(), pool.map(lambda item: code_of(*item), work), strict=True):
            yield {"group": group, "key": key, "code": code}


def code_of(spec: Any, arch: int) -> str:
    from cunorm.kernel import compile
    from cunorm.kernel.source import entry_name, source

    _, code = compile._compile(source(spec), entry_name(spec), f"sm_{arch}", spec)
    return digest(*instructions(code))


def instructions(cubin: bytes) -> list[tuple]:
    """Return the code, constants, shared memory and registers of an ELF file, in order and without names."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + i * size) for i in range(count)]
    contents: list[tuple] = []
    for name, kind, flags, _, offset, length, _, info, *_ in sections:
        begin = sections[names][4] + name
        kind_name = (cubin[begin : cubin.index(b"\0", begin)] + b"..").split(b".")[1:3]
        if kind_name[0] == b"text":
            contents.append((flags, info >> 24, cubin[offset : offset + length]))
        elif kind_name[:1] == [b"nv"] and kind_name[1].startswith(b"constant"):
            contents.append((kind_name[1], cubin[offset : offset + length]))
        elif kind_name[:1] == [b"nv"] and kind_name[1].startswith(b"shared"):
            contents.append((kind, length))
    assert any(isinstance(content[-1], bytes) for content in contents), "no code in the cubin"
    return contents


# Results.

# (rows, cols, dtype, dtype of the others, device of cpu_functions.py)
CALLS = [
    (3, 33, "float32", "float32", "SMALL"),
    (9, 767, "bfloat16", "float32", "MANY_SMS"),
    (5, 1001, "float16", "float16", "SMALL"),
    (9, 4096, "bfloat16", "bfloat16", "SMALL"),
    (4, 8191, "float32", "float16", "WITHOUT_CLUSTERS"),
    (3, 12001, "float64", "float64", "SMALL"),
    (9, 32768, "bfloat16", "bfloat16", "SMALL"),
    (3, 70001, "float16", "float32", "SMALL"),
    (40, 200, "bfloat16", "bfloat16", "FEW_SMS"),
]
LARGEST_OF_USERS = 9000  # columns of operations other than the plain norms


def results() -> Iterator[Fact]:
    """Return a digest for each array that a call on the stand-in returns."""
    import cpu_cupy
    import cpu_functions
    import numpy
    import pytest
    from arrays import bits

    import cunorm
    from cunorm.call.numpy import numpy_dtype

    def hashed(array: Any) -> str:
        return hashlib.sha256(numpy.ascontiguousarray(bits(array.get())).tobytes()).hexdigest()[:16]

    added = cunorm.fuse(
        "layer_norm",
        prologue=lambda x, residual, factor: x + factor * residual,
        epilogue=lambda xhat, weight, z: xhat * weight * z,
        returns=("y", "s"),
    )
    for rows, cols, dtype, other, device in CALLS:
        make = numpy.random.default_rng(cols)

        def array(*shape: int, of: str = dtype, make=make) -> Any:
            return cpu_cupy.asarray(make.standard_normal(shape).astype(numpy_dtype("freeze", of)))

        with pytest.MonkeyPatch.context() as patch:
            cpu_cupy.play(patch, getattr(cpu_functions, device))
            x, dy = array(rows, cols), array(rows, cols, of=other)
            weight, bias = array(cols, of=other), array(cols, of=other)
            returned = {
                "layer_norm": cunorm.layer_norm_forward(x, None, weight, bias),
                "rms_norm": cunorm.rms_norm_forward(x, None, weight),
            }
            _, mean, rstd = returned["layer_norm"]
            returned["layer_norm_backward"] = cunorm.layer_norm_backward(dy, x, mean, rstd, weight)
            _, rms_rstd = returned["rms_norm"]
            returned["rms_norm_backward"] = cunorm.rms_norm_backward(dy, x, rms_rstd, weight)
            if cols <= LARGEST_OF_USERS:
                residual, z = array(rows, cols), array(rows, cols, of=other)
                returned["added"], saved = added.forward(x, residual=residual, factor=0.5, weight=weight, z=z)
                wanted = ("x", "residual", "weight", "z")
                returned["added_backward"] = added.backward(saved, dy, array(rows, cols), wanted=wanted)
                if dtype != "float64":
                    returned["layer_norm_fp8"] = cunorm.layer_norm_fp8(x, None, weight, bias, granularity="row")
        for name, arrays in returned.items():
            if isinstance(arrays, dict):
                arrays = tuple(arrays.values())
            for place, result in enumerate(arrays):
                if result is not None:
                    yield {"group": name, "key": f"{rows} x {cols} {dtype} {place}", "bits": hashed(result)}


# The outside.


def outside() -> Iterator[Fact]:
    """Return the facts that users, checkpoints and exported programs rely on."""
    for module in ("cunorm", "cunorm.torch", "cunorm.jax", "cunorm.flax.linen", "cunorm.flax.nnx"):
        imported = importlib.import_module(module)
        for name in sorted(getattr(imported, "__all__", None) or (n for n in vars(imported) if not n.startswith("_"))):
            thing = getattr(imported, name)
            if not callable(thing) or not str(getattr(thing, "__module__", "")).startswith("cunorm"):
                continue
            call = thing.__init__ if inspect.isclass(thing) else thing  # nnx's metaclass hides the arguments of modules
            signature = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(call)))
            yield {"group": f"signatures of {module}", "key": name, "signature": signature}
    yield from operators()
    yield from modules()
    yield from kept_by_torch()
    yield from kept_by_jax()


def operators() -> Iterator[Fact]:
    import torch

    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("cunorm::"):
            packet = getattr(torch.ops.cunorm, name.removeprefix("cunorm::").partition(".")[0])
            yield {"group": "operators", "key": name, "schema": str(packet.default._schema)}


def modules() -> Iterator[Fact]:
    import cunorm.torch as of_torch

    made = {
        "LayerNorm": of_torch.LayerNorm(8),
        "RMSNorm": of_torch.RMSNorm(8),
        "AddLayerNorm": of_torch.AddLayerNorm(8),
        "AddRMSNorm": of_torch.AddRMSNorm(8),
        "AdaLayerNorm": of_torch.AdaLayerNorm(8),
        "RMSNormGated": of_torch.RMSNormGated(8),
        "LayerNormLinear": of_torch.LayerNormLinear(16, 32, device="cpu"),
    }
    for name, module in made.items():
        keys = {key: list(value.shape) for key, value in module.state_dict().items() if hasattr(value, "shape")}
        yield {"group": "state dicts", "key": name, "keys": str(keys)}


def kept_by_torch() -> Iterator[Fact]:
    """Return shapes and dtypes of what each call keeps for its backward pass, on the CPU and on the stand-in."""
    import pytest
    import torch
    import torch_stand_in

    import cunorm.torch as of_torch

    def leaf(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=torch.bfloat16, requires_grad=True)

    calls = {
        "layer_norm": lambda: of_torch.layer_norm(leaf(4, 16), (16,), leaf(16), leaf(16)),
        "rms_norm": lambda: of_torch.rms_norm(leaf(4, 16), (16,), leaf(16)),
        "add_layer_norm": lambda: of_torch.add_layer_norm(leaf(4, 16), leaf(4, 16), leaf(16), leaf(16))[0],
        "add_rms_norm": lambda: of_torch.add_rms_norm(leaf(4, 16), leaf(4, 16), leaf(16))[0],
        "layer_norm_linear": lambda: of_torch.layer_norm_linear(leaf(4, 16), leaf(8, 16), leaf(8), leaf(16), leaf(16)),
    }
    for where in ("on the CPU", "on the stand-in"):
        for name, call in calls.items():
            kept: list[str] = []
            with pytest.MonkeyPatch.context() as patch:
                if where == "on the stand-in":
                    if name == "layer_norm_linear":
                        continue
                    torch_stand_in.play(patch)
                keep = lambda t, kept=kept: kept.append(f"{tuple(t.shape)} {t.dtype}") or t  # noqa: E731
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                    call()
            yield {"group": "kept by torch", "key": f"{name} {where}", "kept": "; ".join(kept)}


def kept_by_jax() -> Iterator[Fact]:
    import jax
    import jax.numpy as jnp

    import cunorm.jax as of_jax

    x, w = jnp.ones((4, 16), "bfloat16"), jnp.ones(16, "bfloat16")
    calls = {
        "layer_norm": (lambda x, w, b: of_jax.layer_norm(x, None, w, b), (x, w, w)),
        "rms_norm": (lambda x, w: of_jax.rms_norm(x, None, w), (x, w)),
    }
    for name, (call, arguments) in calls.items():
        _, backward = jax.vjp(call, *arguments)
        kept = [f"{leaf.shape} {leaf.dtype}" for leaf in jax.tree.leaves(backward) if hasattr(leaf, "shape")]
        yield {"group": "kept by JAX", "key": name, "kept": "; ".join(kept)}


# Errors.


def errors() -> Iterator[Fact]:
    """Return the text of each error that a test of bad input expects, by the test and its place there."""
    import pytest
    from _pytest.raises import RaisesExc

    texts: list[Fact] = []

    class Recorder:
        test, place = "", 0

        def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
            self.test, self.place = nodeid.rpartition("/")[2], 0

        def note(self, error: BaseException | None) -> None:
            if error is not None:
                group, _, key = self.test.partition("::")
                texts.append({"group": group, "key": f"{key} {self.place}", "message": str(error)})
                self.place += 1

    recorder, leave = Recorder(), RaisesExc.__exit__

    def exit_and_note(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        recorder.note(error)
        return leave(self, kind, error, trace)

    RaisesExc.__exit__ = exit_and_note  # type: ignore[method-assign]
    try:
        files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "raises(" in path.read_text()]
        wanted = [
            path for path in files if re.search(r"error|calls|expression\.|_fused\.|commands|linear_module", path)
        ]
        pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "-x", *wanted], [recorder])
    finally:
        RaisesExc.__exit__ = leave  # type: ignore[method-assign]
    yield from texts


if __name__ == "__main__":
    raise SystemExit(main())
