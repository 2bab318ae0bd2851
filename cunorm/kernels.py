"""From `KernelSpec` to a kernel: the CUDA text, its compilation, and the cache of compiled kernels.

The text is the files of `kernels_cu/` followed by a few generated lines that instantiate one template behind one
`extern "C"` entry. Included files are put into the text itself: the key of CuPy's disk cache is a hash of the text and
does not see what `#include` would reach, so an edited header would not recompile.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future
from functools import cache, lru_cache
from importlib import resources
from typing import Any, NamedTuple

from .device import NON_PORTABLE_CLUSTER_SIZE_ALLOWED
from .tiers import MAILBOX, NORMS, SHARED_ALIGNMENT, SUM_COLUMNS, WEIGHT_BYTES, WEIGHT_PACKS, KernelSpec, dynamic_shared

OPTIONS = ("--std=c++17", "-fmad=false")  # platform.cuh says why
AS_CUPY = ("-ftz=true", "-default-device")  # what CuPy adds; NVRTC 13.0 wants the second for lambdas

CPP_TYPE = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double", None: "Absent"}

FILES = {
    "forward": "norm_forward.cu",
    "forward_streamed": "norm_forward_streamed.cu",
    "backward": "norm_backward.cu",
    "backward_streamed": "norm_backward_streamed.cu",
    "weight_gradient_partials": "weight_gradient.cu",
    "sum_partials": "weight_gradient.cu",
}


# What host and device both count with.
SHARED_FACTS = "namespace cunorm {{\n{}}}\n".format(
    "".join(
        f"constexpr int {name} = {value};\n"
        for name, value in {
            "kWeightBytes": WEIGHT_BYTES,
            "kWeightPacks": WEIGHT_PACKS,
            "kSumColumns": SUM_COLUMNS,
            "kMailboxBytes": MAILBOX,
            "kSharedAlignment": SHARED_ALIGNMENT,
        }.items()
    )
)


class Baked(NamedTuple):
    """What stands in the text of an entry whose only parameters are `pointers`, in this order.

    `values` are the C++ expressions of other arguments, by name: of a pointer one that names another pointer, without
    any it is null.
    """

    pointers: tuple[str, ...]
    values: tuple[tuple[str, str], ...]


class CompileError(RuntimeError):
    """NVRTC rejected a kernel. The message holds its log: a bug in cunorm, or an NVRTC that is too old."""


class Resources(NamedTuple):
    """What ptxas says that a kernel uses: registers a thread, and bytes."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


_kernels: dict[tuple[KernelSpec, int], Future] = {}
_lock = threading.Lock()


def kernel(spec: KernelSpec, device_id: int) -> Any:
    """The compiled kernel, a callable `(grid, block, args)` (cupy.cuda.Function). Device `device_id` must be current.

    Threads may call at once: one of them compiles, the others wait for it.
    """
    key = (spec, device_id)
    found = _kernels.get(key)
    if found is None:
        with _lock:
            found = _kernels.get(key)
            mine = found is None
            if found is None:
                found = _kernels[key] = Future()
        if mine:
            try:
                found.set_result(_compile(spec))
            except BaseException as error:
                del _kernels[key]
                found.set_exception(error)
    return found.result()


def _compile(spec: KernelSpec) -> Any:
    import cupy

    try:
        compiled = cupy.RawModule(code=source(spec), options=OPTIONS).get_function(entry_name(spec))
    except cupy.cuda.compiler.CompileException as error:
        raise CompileError(f"cunorm: NVRTC could not compile {entry_name(spec)} for {spec}:\n{error}") from error
    dynamic = dynamic_shared(spec)
    if dynamic:
        compiled.max_dynamic_shared_size_bytes = dynamic
    if spec.shape.cluster > 8:
        cupy.cuda.driver.funcSetAttribute(compiled.kernel.ptr, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    compiled.preferred_shared_memory_carveout = _carveout(spec.threads, compiled.shared_size_bytes + dynamic)
    return compiled.kernel


def _carveout(threads: int, shared: int) -> int:
    """Per cent of the SM's memory to be shared memory rather than L1, so that 2048 threads fit an SM.

    Left to itself the driver gave kernels that need little so little (8 KB on an H200, by ncu) that seven CTAs of 64
    threads filled it. Each CTA takes 1 KB besides its own.
    """
    ctas = min(32, 2048 // threads)
    return min(100, -(-100 * ctas * (shared + 1024) // (228 << 10)))


def compile_for(spec: KernelSpec, arch: int, baked: Baked | None = None) -> Resources:
    """Compile for any architecture, with no GPU and no driver: what the kernel uses."""
    log, _ = _compile_offline(source(spec, baked), entry_name(spec), f"sm_{arch}", "--ptxas-options=-v")
    return _parse_resources(log)


@lru_cache(maxsize=512)
def ptx(spec: KernelSpec, baked: Baked, arch: int) -> str:
    """The PTX of an entry with pointers alone, for XLA to launch; with no GPU and no driver."""
    return compile_ptx(source(spec, baked), entry_name(spec), arch)


def compile_ptx(text: str, name: str, arch: int) -> str:
    """The PTX of any CUDA text, without the globals that NVRTC makes of the templates' constants and nothing reads.

    With them the driver takes twice as long to load a kernel that it has compiled before, 0.13 ms instead of 0.06.
    """
    _, text = _compile_offline(text, name, f"compute_{arch}")
    unread = re.compile(r"\.global [^=;]*?([\w$]+)(\[\d+\])?( = .*)?;\n", re.MULTILINE)
    return unread.sub(lambda found: found[0] if text.count(found[1]) > 1 else "", text)


def why_ptx_is_too_new() -> str:
    """Why the driver cannot read the PTX that NVRTC writes, and what to do; empty if it can."""
    import cupy
    from cupy_backends.cuda.libs import nvrtc

    version, driver = nvrtc.getVersion(), cupy.cuda.runtime.driverGetVersion()
    if 1000 * version[0] + 10 * version[1] <= driver:
        return ""
    return (
        f"the PTX of NVRTC {version[0]}.{version[1]} is too new for the driver, of CUDA {driver // 1000}."
        f"{driver % 1000 // 10}; update the driver, or install nvidia-cuda-nvrtc of its version"
    )


def _compile_offline(text: str, name: str, target: str, *options: str) -> tuple[str, str]:
    """(log, PTX), the latter empty for a target that is machine code."""
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, *AS_CUPY, f"-arch={target}", *options))
        code = nvrtc.getPTX(program) if target.startswith("compute") else b""
        return nvrtc.getProgramLog(program), code.decode()
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise CompileError(f"cunorm: NVRTC could not compile {name} for {target}:\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def entry_name(spec: KernelSpec) -> str:
    return f"cunorm_{spec.kernel}"


def source(spec: KernelSpec, baked: Baked | None = None) -> str:
    """The whole CUDA text of a kernel."""
    return f"{SHARED_FACTS}{_file_text(FILES[spec.kernel])}\n{_entry(spec, baked)}"


@cache
def _file_text(name: str) -> str:
    return _inlined(name, set())


def _inlined(name: str, seen: set[str]) -> str:
    seen.add(name)
    lines = [f'#line 1 "{name}"']
    text = resources.files("cunorm.kernels_cu").joinpath(name).read_text()
    for number, line in enumerate(text.splitlines(), 1):
        included = re.fullmatch(r'#include "(.+)"', line)
        if included:
            if included[1] not in seen:
                lines.append(_inlined(included[1], seen))
            lines.append(f'#line {number + 1} "{name}"')
        elif line != "#pragma once":
            lines.append(line)
        else:
            lines.append("")
    return "\n".join(lines)


def _entry(spec: KernelSpec, baked: Baked | None) -> str:
    """The entry point of a spec: the arguments that launch.py passes, or those left of them, and the template."""
    shape = spec.shape
    x, y, weight, bias = (CPP_TYPE[dtype] for dtype in (spec.x, spec.y, spec.weight, spec.bias))
    compute = "double" if spec.x == "float64" else "float"
    zero_centered, aligned = (_cpp(flag) for flag in (spec.zero_centered_gamma, spec.aligned))
    norm = NORMS[spec.norm].policy
    row_shape = f"RowShape<{spec.cols}, {shape.pack}, {shape.threads}, {shape.packs}, {shape.cluster}>"
    step_shape = f"RowShape<{shape.pack * shape.threads}, {shape.pack}, {shape.threads}, 1, 1>"
    cache_x, cache_y = (f"Cache::{'kStreamed' if flag else 'kKept'}" for flag in (spec.streamed_x, spec.streamed_y))
    load_x = f"LoadRows<{x}, {shape.pack}, {aligned}, {cache_x}>{{x, x_stride}}"
    load_dy = f"LoadRows<{y}, {shape.pack}, {aligned}, {cache_y}>{{dy, dy_stride}}"
    scale = f"ScaleByWeight<{weight}, {shape.pack}, {zero_centered}, {aligned}>{{weight}}"
    store_dx = f"StoreRows<{x}, {shape.pack}, {aligned}>{{dx, {spec.cols}}}"
    store_y = (
        f"StoreAffine<{y}, {weight}, {bias}, {shape.pack}, {zero_centered}, {aligned}, {cache_y}>"
        "{y, y_stride, weight, bias}"
    )
    gradients = f"Gradients<{', '.join(_cpp(flag) for flag in spec.output_mask)}>"
    forward_parameters = (
        f"const {x}* x, {y}* y, const {weight}* weight, const {bias}* bias, {compute}* mean, {compute}* rstd, "
        f"int64 rows, int64 x_stride, int64 y_stride, {compute} eps"
    )
    if spec.final:
        sums = weight if spec.weight else x
        store = f"StoreGradient<{sums}, {shape.pack}, {spec.cols}, {aligned}>"
    else:
        sums = compute
        store = f"StorePartial<{sums}, {shape.pack}, {spec.cols}>"
    store_sums = f"{store}{{dweight}}, {store}{{dbias}}"
    backward_parameters = (
        f"const {x}* x, const {y}* dy, const {weight}* weight, const {compute}* mean, const {compute}* rstd, {x}* dx, "
        f"{sums}* dweight, {sums}* dbias, int64 rows, int64 x_stride, int64 dy_stride"
    )
    if spec.kernel == "forward":
        parameters = forward_parameters
        call = (
            f"norm_forward<{norm}, {row_shape}, {spec.rows_per_cta}, Rows, {_cpp(spec.operands_stay)}, "
            f"{_cpp(spec.once)}, {compute}>"
            f"({load_x}, {store_y}, mean, rstd, rows, eps)"
        )
    elif spec.kernel == "forward_streamed":
        parameters = forward_parameters
        call = (
            f"norm_forward_streamed<{norm}, {spec.cols}, {step_shape}, {compute}>"
            f"({load_x}, {store_y}, mean, rstd, rows, eps)"
        )
    elif spec.kernel == "backward":
        parameters = backward_parameters
        call = (
            f"norm_backward<{norm}, {row_shape}, {spec.rows_per_cta}, Rows, {gradients}, {compute}>"
            f"({load_x}, {load_dy}, {scale}, {store_dx}, mean, rstd, {store_sums}, rows)"
        )
    elif spec.kernel == "backward_streamed":
        parameters = backward_parameters
        call = (
            f"norm_backward_streamed<{norm}, {spec.cols}, {step_shape}, {compute}>"
            f"({load_x}, {load_dy}, {scale}, {store_dx}, mean, rstd, rows)"
        )
    elif spec.kernel == "weight_gradient_partials":
        parameters = backward_parameters
        call = (
            f"weight_gradient_partials<{norm}, {spec.cols}, {shape.pack}, {gradients}, {compute}>"
            f"({load_x}, {load_dy}, mean, rstd, {store_sums}, rows)"
        )
    else:
        parameters = f"const {x}* partials, {y}* first, {y}* second, int64 groups, int64 cols"
        row = f"PartialRow<{shape.pack}>{{cols}}"
        of_this = f"partials + blockIdx.y * groups * {row}.stride(), blockIdx.y ? second : first"
        call = f"sum_partials<{shape.threads}, {spec.rows_per_cta}, {shape.pack}>({of_this}, groups, cols)"
    rows = ""
    if spec.kernel in ("forward", "backward"):
        kind = (
            f"SharedRows<{row_shape}, {spec.rows_per_cta}, {spec.stages}, {_cpp(spec.ask_early)}, Load>"
            if spec.stages
            else f"RegisterRows<{row_shape}, {spec.rows_per_cta}, {_cpp(spec.prefetch)}, Load>"
        )
        rows = f"template <class Load>\nusing Rows = {kind};\n"
    cluster = f" __cluster_dims__({shape.cluster}, 1, 1)" if shape.cluster > 1 else ""
    constants = ""
    if baked is not None:
        parameters, constants, offsets = _bake(parameters, baked)
        call = f"{offsets}{call}"
    return (
        f"using namespace cunorm;\n{rows}{constants}"
        f'extern "C" __global__ void{cluster} __launch_bounds__({spec.threads}, {spec.ctas_per_sm})\n'
        f"{entry_name(spec)}({parameters}) {{\n  {call};\n}}\n"
    )


def _bake(parameters: str, baked: Baked) -> tuple[str, str, str]:
    """(the parameters that are left, definitions before the entry, definitions in it).

    What is no parameter any more stands in constant memory, as parameters do, so that the compiler knows no more of it:
    of literals and nullptr ptxas made kernels that spill up to 8 bytes.
    """
    types = {name: kind for kind, _, name in (parameter.rpartition(" ") for parameter in parameters.split(", "))}
    left = ", ".join(f"{types.pop(name)} {name}" for name in baked.pointers)
    values = dict(baked.values)
    offsets = "".join(
        f"{types.pop(name)} {name} = {values.pop(name)};\n  " for name in list(values) if types[name].endswith("*")
    )
    constants = "".join(
        f"__constant__ {kind} {name} = {values.get(name, 'nullptr')};\n" for name, kind in types.items()
    )
    return left, constants, offsets


def _cpp(flag: bool) -> str:
    return "true" if flag else "false"


def _parse_resources(log: str) -> Resources:
    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        shared=number(r"(\d+) bytes smem"),
    )
