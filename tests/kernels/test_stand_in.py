"""The stand-in for a GPU: its formats round as on a GPU, and misuse that a GPU may let pass is an error."""

from __future__ import annotations

import ml_dtypes
import numpy
import pytest
from arrays import inputs
from cpu_device import Launch, Machine, SanitizerError, memory, missing, program, run
from cpu_functions import check
from reference import narrow

from cunorm.kernel import launch

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

FORMATS = r"""
#include "platform.cuh"
using namespace cunorm;
void entry(const uint16* words, float* decoded, const double* values, uint16* from_float, uint16* from_double) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  decoded[i] = FORMAT::decode_high(static_cast<uint32>(words[i]) << 16 | 0x1234);
  from_float[i] = FORMAT::encode(static_cast<float>(values[i]));
  from_double[i] = FORMAT::encode(before_narrowing(values[i]));
}
const cpu::Kernel cpu::kernel = cpu::Erased<&entry>::kernel;
"""


@pytest.mark.parametrize(
    ("cpp", "dtype"), [("half", numpy.dtype("float16")), ("bfloat16", numpy.dtype(ml_dtypes.bfloat16))]
)
def test_every_value_of_16_bits(cpp, dtype):
    """Each value is decoded, and encoded from itself, from half way to the next value, and from beside that."""
    words = numpy.arange(2**16, dtype="uint16")
    path = program(FORMATS.replace("FORMAT", cpp), "results")
    with numpy.errstate(all="ignore"):
        numbers = words.view(dtype).astype("float64")
        following = numpy.roll(numbers, -1)
        for fraction in (0.0, 0.5 - 2.0**-12, 0.5, 0.5 + 2.0**-12, 0.5 - 2.0**-40, 0.5 + 2.0**-40):
            values = numbers + (following - numbers) * fraction if fraction else numbers
            arrays = {
                "words": words,
                "decoded": numpy.empty(2**16, "float32"),
                "values": values,
                "from_float": numpy.empty(2**16, "uint16"),
                "from_double": numpy.empty(2**16, "uint16"),
            }
            with memory(arrays) as pointers:
                run(path, Launch(64, 1, 1, 1024), "P" * len(pointers), tuple(pointers.values()))
            numpy.testing.assert_array_equal(arrays["decoded"], numbers.astype("float32"))
            finite = numpy.isfinite(values)
            assert_same(arrays["from_float"].view(dtype), values.astype("float32").astype(dtype))
            assert_same(arrays["from_double"].view(dtype)[finite], narrow(values[finite], dtype.name))


def assert_same(actual, expected):
    """Check that values are the same. Any NaN is NaN, but zeros must have the same sign."""
    actual, expected = actual.astype("float32"), expected.astype("float32")
    numpy.testing.assert_array_equal(actual, expected)
    number = ~numpy.isnan(expected)
    numpy.testing.assert_array_equal(numpy.signbit(actual[number]), numpy.signbit(expected[number]))


def test_arguments_of_another_size_are_refused(monkeypatch):
    """eps is passed as eight bytes where the kernel reads four."""
    monkeypatch.setitem(launch.NUMBERS, "float32", launch.NUMBERS["float64"])
    launch.prepared.cache_clear()  # another test may have run this plan
    x, dy, weight, bias = inputs(numpy, 3, 33, "float32")
    with pytest.raises(SanitizerError, match="the arguments of the launch are not those of the kernel"):
        check(Machine(), "layer_norm", x, dy, weight, bias)
    launch.prepared.cache_clear()  # another test may run it later


DYNAMIC = 64 * 16  # bytes
KERNEL = r"""
#include "platform.cuh"
using namespace cunorm;
void entry(float* out) {{
  __shared__ float shared[64];
  const int thread = threadIdx.x;
  auto* const dynamic = reinterpret_cast<float*>(dynamic_shared());  // [64][4]
  float* const mine = dynamic + 4 * thread;
  {body}
}}
const cpu::Kernel cpu::kernel = cpu::Erased<&entry>::kernel;
"""

MISUSE = {
    "a thread that left before its warp shuffles": (
        "if (thread == 40) return; out[thread] = shuffle_xor(1.f, 1);",
        "results",
        "deadlock: .* thread 32 waits for ever for a shuffle",
    ),
    "lanes at different shuffles": (
        "out[thread] = thread % 32 ? shuffle_xor(1.f, 1) : shuffle_xor(1.f, 2);",
        "results",
        "the lanes of a warp are at different shuffles",
    ),
    "a barrier in one branch": (
        "if (thread < 32) __syncthreads(); out[thread] = 0;",
        "results",
        "deadlock: .* a barrier",
    ),
    "a barrier for half a warp": ("barrier(1, 16);", "results", "a barrier is for whole warps"),
    "a race within a warp": (
        "shared[thread] = 0; out[thread] = shared[thread ^ 1];",
        "races",
        "race: ",
    ),
    "a race between warps": (
        "shared[thread] = 0; shuffle_xor(1.f, 1); out[thread] = shared[thread ^ 32];",
        "races",
        "race: ",
    ),
    "written while others still read": (
        "shared[thread] = 0; __syncthreads(); out[thread] = shared[63 - thread]; shared[thread] = 1;",
        "races",
        "race: ",
    ),
    "global memory before an array": ("out[thread - 1] = 0;", "memory", "heap-buffer-overflow"),
    "global memory behind an array": ("out[thread + 1] = 0;", "memory", "heap-buffer-overflow"),
    "shared memory behind an array": ("shared[thread + 1] = 0;", "memory", "index 64 out of bounds"),
    "an element at an odd address": (
        "*reinterpret_cast<float*>(reinterpret_cast<char*>(out) + 1) = 0;",
        "memory",
        "misaligned address",
    ),
    "dynamic shared memory behind what the launch asked for": ("mine[4] = 0;", "memory", "heap-buffer-overflow"),
    "a race in dynamic shared memory": (
        "mine[0] = 0; shuffle_xor(1.f, 1); out[thread] = dynamic[4 * (thread ^ 32)];",
        "races",
        "race: shared memory is accessed by two threads",
    ),
    "a vector at an odd place of dynamic shared memory": (
        "uint32 words[4]; load_shared_words(mine + 2, words);",
        "results",
        "misaligned vector access",
    ),
    "a copy from an odd address": (
        "copy_async<8, Fetch::kAlone>(mine, out + 1);",
        "results",
        "misaligned vector access",
    ),
    "a copy to an odd place": ("copy_async<16, Fetch::kAlone>(mine + 2, out);", "results", "misaligned vector access"),
    "a copy from behind an array": (
        "copy_async<16, Fetch::kAlone>(mine, out + (thread + 4) / 4 * 4);",
        "memory",
        "heap-buffer-overflow",
    ),
    "a copy of a word that is in no array": (
        "copy_covering_async<16, Fetch::kAlone>(mine, out + (thread + 4) / 4 * 4);",
        "memory",
        "a copy of what is in no array",
    ),
    "a covering load of what is not there": (
        "uint32 words[8]; load_covering_words<Cache::kKept, 16, false>(out + 1, 4 * thread * 4, 16, words);",
        "memory",
        "heap-buffer-overflow",
    ),
    "a lane that shuffles down beside others that do not": (
        "out[thread] = thread % 32 ? shuffle_down(1.f) : shuffle_xor(1.f, 1);",
        "results",
        "the lanes of a warp are at different shuffles",
    ),
    "a copy to behind dynamic shared memory": (
        "copy_async<16, Fetch::kAlone>(mine + 4, out);",
        "memory",
        "heap-buffer-overflow",
    ),
    "a place is read while a copy to it is under way": (
        "copy_async<4, Fetch::kAlone>(mine, out); copies_commit(); copies_wait<1>(); out[thread] = mine[0];",
        "races",
        "race: .* while a copy to it is under way",
    ),
    "a place is written while a copy to it is under way": (
        "copy_async<4, Fetch::kAlone>(mine, out); copies_commit(); mine[0] = 0; copies_wait<0>();",
        "races",
        "race: .* while a copy to it is under way",
    ),
    "two copies to a place": (
        "copy_async<4, Fetch::kAlone>(mine, out); copy_async<4, Fetch::kAlone>(mine, out + 1);"
        "copies_commit(); copies_wait<0>();",
        "races",
        "race: .* while a copy to it is under way",
    ),
    "a thread that ends before its copy has come": (
        "copy_async<4, Fetch::kAlone>(mine, out); copies_commit(); copies_wait<1>();",
        "races",
        "a thread ends while a copy of its own is under way",
    ),
    "a copy that another thread waits for": (
        "if (thread == 0) copy_async<4, Fetch::kAlone>(dynamic, out); copies_commit(); __syncthreads();"
        "copies_wait<0>();"
        "out[thread] = dynamic[0];",
        "races",
        "race: ",
    ),
    "sums put where a copy of another thread is under way": (
        "if (thread == 0) copy_async<4, Fetch::kAlone>(dynamic, out); copies_commit(); __syncthreads();"
        "if (thread == 63) dynamic[0] = 0;",
        "races",
        "race: .* while a copy to it is under way",
    ),
}


def run_body(body: str, build: str) -> numpy.ndarray:
    out = numpy.arange(64, dtype="float32")
    with memory({"out": out}) as pointers:
        run(
            program(KERNEL.format(body=body), build),
            Launch(1, 1, 1, 64, dynamic_shared=DYNAMIC),
            "P",
            (pointers["out"],),
        )
    return out


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_found(name):
    body, build, said = MISUSE[name]
    with pytest.raises(SanitizerError, match=f"(?s){said}"):
        run_body(body, build)


@pytest.mark.parametrize("build", ["results", "memory", "races"])
def test_right_use_is_not(build):
    """Values that go from thread to thread by shared memory, shuffles and copies raise no error."""
    body = """
    copy_async<16, Fetch::kNeighbours>(mine, out + thread / 4 * 4);
    copies_commit();
    shared[thread] = static_cast<float>(thread);
    __syncthreads();
    const float other = shared[63 - thread];
    __syncthreads();
    shared[thread] = other + shuffle_xor(other, 1);
    copies_wait<0>();
    __syncthreads();
    uint32 words[4];
    load_shared_words(dynamic + 4 * (63 - thread), words);
    warp_barrier();
    out[thread] = shared[thread] + 1000 * word_to_float(words[thread % 4]);
    """
    thread = numpy.arange(64)
    copied = (63 - thread) // 4 * 4 + thread % 4
    numpy.testing.assert_array_equal(run_body(body, build), (63 - thread) + (63 - (thread ^ 1)) + 1000 * copied)


@pytest.mark.parametrize("build", ["results", "memory"])
def test_a_load_that_is_not_there_brings_zeros(build):
    """Such a load touches no memory, wherever its address is."""
    body = """
    uint32 words[4];
    load_words<Cache::kKept>(out + 1000003, words, false);
    out[thread] = word_to_float(words[thread % 4]);
    """
    assert not run_body(body, build).any()


def test_shuffles_down_bring_the_next_lane():
    thread = numpy.arange(64)
    expected = numpy.where(thread % 32 == 31, thread, thread + 1)
    numpy.testing.assert_array_equal(run_body("out[thread] = shuffle_down(out[thread]);", "results"), expected)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("shuffle(out[thread], 5)", lambda thread: thread // 32 * 32 + 5),
        ("shuffle(out[thread], static_cast<int>(thread) % 32 / 8 * 8)", lambda thread: thread // 8 * 8),
        ("largest_of_warp(static_cast<uint32>(out[thread]))", lambda thread: thread // 32 * 32 + 31),
        ("larger_magnitude(out[thread], -12.f)", lambda thread: numpy.maximum(thread, 12)),
        ("larger_magnitude(-out[thread], word_to_float(0xffc00000))", lambda thread: numpy.nan * thread),
    ],
)
def test_what_other_lanes_have_and_what_is_larger(expression, expected):
    values = run_body(f"out[thread] = static_cast<float>({expression});", "results")
    numpy.testing.assert_array_equal(values, expected(numpy.arange(64)))


def test_a_funnel_shift_takes_bits_of_both_words():
    body = "out[thread] = static_cast<float>(funnel_shift(0x00070003, 0x00050009, 16 + 32 * thread));"
    assert (run_body(body, "results") == 0x00090007).all()


@pytest.mark.parametrize("build", ["results", "memory"])
def test_a_covering_load_brings_its_bytes_and_nothing_beside_them(build):
    """It loads the last three floats of the array, which begin with the second float of a vector."""
    body = """
    uint32 words[8];
    load_covering_words<Cache::kKept, 16, false>(out + 61, 0, 12, words);
    __syncthreads();
    if (thread < 8) out[thread] = word_to_float(words[thread]);
    """
    values = run_body(body, build)
    numpy.testing.assert_array_equal(values[:8], [numpy.nan, 61, 62, 63, *[numpy.nan] * 4])


def test_shared_memory_is_not_zero_at_first():
    assert numpy.isnan(run_body("out[thread] = shared[thread];", "results")).all()
    assert numpy.isnan(run_body("out[thread] = mine[3];", "results")).all()


# Three copies are in two groups, a third group is empty, and a fourth copy is not committed. The kernel waits until at
# most PENDING groups are under way.
COPIES = """
for (int i = 0; i < 4; ++i) mine[i] = -1;
copy_async<4, Fetch::kAlone>(mine, out);
copy_async<4, Fetch::kAlone>(mine + 1, out + 1);
copies_commit();
copy_async<4, Fetch::kAlone>(mine + 2, out + 2);
copies_commit();
copies_commit();
copy_async<4, Fetch::kAlone>(mine + 3, out + 3);
copies_wait<PENDING>();
if (thread == 0) for (int i = 0; i < 4; ++i) out[i] = mine[i];
"""


@pytest.mark.parametrize("build", ["results", "memory"])
@pytest.mark.parametrize(("pending", "come"), [(3, 0), (2, 2), (1, 3), (0, 3)])
def test_copies_come_when_they_are_waited_for_and_no_sooner(pending, come, build):
    """Until then the place holds NaN, which is neither what comes nor what was there."""
    values = run_body(COPIES.replace("PENDING", str(pending)), build)[:4]
    numpy.testing.assert_array_equal(values, [*range(come), *[numpy.nan] * (4 - come)])


def test_dynamic_shared_memory_is_aligned():
    body = "out[thread] = static_cast<float>(reinterpret_cast<std::uintptr_t>(dynamic) % 128);"
    assert not run_body(body, "results").any()
