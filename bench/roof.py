"""The practical roof: kernels that read and write as many bytes as the operation and compute nothing.

Which of them is fastest depends on the bytes and on reads : writes, so there are many: threads that copy 16 bytes at a
time, in every shape, and a ring of bulk copies that no thread touches. `bench/roofs.py` finds the fastest of a size.
One kernel would not do: a bound must not be beaten by another kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

PACK = 16  # bytes of an access
WORKERS = 16

# out = a, or a ^ b where there are two, so that reading b is not dead code.
THREADS_TEXT = """
#define HINT @HINT@
__device__ __forceinline__ uint4 load(const uint4* p) {
  uint4 v;
  asm volatile("ld.global" HINT ".v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store(uint4* p, uint4 v) {
  asm volatile("st.global" HINT ".v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
template <bool WHOLE>
__device__ __forceinline__ void tile(const uint4* a, const uint4* b, uint4* out, long long first, long long n) {
  uint4 va[@ACCESSES@], vb[@ACCESSES@];  // all asked for before the first is used
#pragma unroll
  for (int i = 0; i < @ACCESSES@; ++i) {
    const long long at = first + i * @THREADS@ + threadIdx.x;
    if (WHOLE || at < n) {
      va[i] = load(a + at);
      if (@READS@ == 2) vb[i] = load(b + at);
    }
  }
#pragma unroll
  for (int i = 0; i < @ACCESSES@; ++i) {
    const long long at = first + i * @THREADS@ + threadIdx.x;
    if (WHOLE || at < n) {
      uint4 v = va[i];
      if (@READS@ == 2) { v.x ^= vb[i].x; v.y ^= vb[i].y; v.z ^= vb[i].z; v.w ^= vb[i].w; }
      store(out + at, v);
    }
  }
}
extern "C" __global__ void __launch_bounds__(@THREADS@)
    stream(const uint4* a, const uint4* b, uint4* out, long long n) {
  const long long size = @THREADS@ * @ACCESSES@, step = @PERSISTENT@ ? gridDim.x * size : n;
  for (long long first = blockIdx.x * size; first < n; first += step) {
    if (first + size <= n) tile<true>(a, b, out, first, n);
    else tile<false>(a, b, out, first, n);
  }
}
"""

# One thread loads tiles of a (and b) and stores those of a, only by bulk copies: out = a. A stage is loaded again once
# the tile before it has been read out of shared memory, so that the thread waits for no store that it just began.
RING_TEXT = """
extern __shared__ __align__(128) unsigned char places[];
__device__ __forceinline__ unsigned shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void ask(const unsigned char* from, unsigned to, unsigned bytes, unsigned arrival) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(arrival) : "memory");
}
extern "C" __global__ void __launch_bounds__(32)
    stream(const unsigned char* a, const unsigned char* b, unsigned char* out, long long n) {
  __shared__ __align__(8) unsigned long long arrivals[@STAGES@];
  if (threadIdx.x != 0) return;
  const long long bytes = 16 * n, size = @BYTES@, tiles = (bytes + size - 1) / size;
  for (int i = 0; i < @STAGES@; ++i)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared(&arrivals[i])) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  auto length = [&](long long tile) { return (unsigned)min(size, bytes - tile * size); };
  auto fill = [&](long long visit) {
    const long long tile = blockIdx.x + visit * gridDim.x;
    if (tile >= tiles) return;
    const int stage = (int)(visit % @STAGES@);
    const unsigned arrival = shared(&arrivals[stage]), place = shared(places) + stage * @READS@ * @BYTES@;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(arrival), "r"(@READS@ * length(tile)) : "memory");
    ask(a + tile * size, place, length(tile), arrival);
    if (@READS@ == 2) ask(b + tile * size, place + @BYTES@, length(tile), arrival);
  };
  for (int visit = 0; visit < @STAGES@; ++visit) fill(visit);
  for (long long visit = 0; blockIdx.x + visit * gridDim.x < tiles; ++visit) {
    const long long tile = blockIdx.x + visit * gridDim.x;
    const int stage = (int)(visit % @STAGES@);
    const unsigned phase = (unsigned)(visit / @STAGES@) & 1;
    unsigned here;
    do {
      asm volatile("{\\n.reg .pred here;\\n"
                   "mbarrier.try_wait.parity.shared::cta.b64 here, [%1], %2;\\n"
                   "selp.u32 %0, 1, 0, here;\\n}"
                   : "=r"(here) : "r"(shared(&arrivals[stage])), "r"(phase) : "memory");
    } while (!here);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(out + tile * size), "r"(shared(places) + stage * @READS@ * @BYTES@), "r"(length(tile))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    if (visit > 0) fill(visit - 1 + @STAGES@);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""


@dataclass(frozen=True)
class Variant:
    """A kernel and how many of its CTAs an SM holds; `ctas` bounds the bytes under way."""

    reads: int
    threads: int  # 32 for a ring
    ctas: int
    accesses: int = 0  # 16-byte accesses of a thread to each array
    persistent: bool = True
    no_allocate: bool = False  # whether accesses go past L1
    stages: int = 0  # of a ring
    tile: int = 0  # bytes of a ring's tile

    @property
    def cta_bytes(self) -> int:
        """Bytes that a CTA has under way."""
        return self.reads * (self.stages * self.tile or self.threads * self.accesses * PACK)

    @property
    def under_way(self) -> int:
        """Bytes that an SM has under way."""
        return self.ctas * self.cta_bytes

    @property
    def dynamic_shared(self) -> int:
        """Bytes of a ring's stages, or else as many as keep an SM from holding more CTAs than `ctas`.

        Each CTA takes 1 KB besides its own. A persistent kernel needs none, because its grid has no more CTAs.
        """
        if self.stages:
            return self.cta_bytes
        if self.persistent or self.ctas >= 2048 // self.threads:
            return 0
        return (228 // self.ctas - 1 << 10) & ~127

    @property
    def text(self) -> str:
        values = {
            "READS": self.reads,
            "THREADS": self.threads,
            "ACCESSES": self.accesses,
            "PERSISTENT": int(self.persistent),
            "HINT": '".L1::no_allocate"' if self.no_allocate else '""',
            "STAGES": self.stages,
            "BYTES": self.tile,
        }
        text = RING_TEXT if self.stages else THREADS_TEXT
        for name, value in values.items():
            text = text.replace(f"@{name}@", str(value))
        return text

    def grid(self, n: int, sms: int) -> int:
        """Return the number of CTAs for arrays of n vectors."""
        size = self.tile // PACK or self.threads * self.accesses
        tiles = -(-n // size)
        return max(1, min(tiles, sms * self.ctas) if self.persistent else tiles)

    def describe(self) -> dict[str, Any]:
        """Return, for a line of results, the fields that are not 0, and the bytes under way."""
        given = {name: value for name, value in asdict(self).items() if value}
        return given | {"kb_under_way_an_sm": self.under_way / 1024}


def variants(reads: int, arch: int = 90) -> list[Variant]:
    """Return every kernel that is tried, each once."""
    kept: dict[Variant, None] = {}
    for threads, accesses, kilobytes in itertools.product((128, 256, 512), (1, 2, 4), (16, 32, 48, 64, 128)):
        ctas = (kilobytes << 10) // (reads * threads * accesses * PACK)
        if ctas:
            for persistent, no_allocate in itertools.product((False, True), repeat=2):
                ctas = min(ctas, 2048 // threads)
                kept[Variant(reads, threads, ctas, accesses, persistent, no_allocate)] = None
    if arch >= 90:  # bulk copies
        for stages, kilobytes, ctas in itertools.product((2, 3, 4), (8, 16), (1, 2, 4)):
            ring = Variant(reads, 32, ctas, stages=stages, tile=kilobytes << 10)
            if 16 << 10 <= ring.under_way <= 128 << 10:
                kept[ring] = None
    return list(kept)


def distinct(tried: Iterable[Variant], n: int, sms: int) -> list[Variant]:
    """Return the variants that differ for arrays of n vectors.

    If all CTAs run at once, neither their number on an SM nor persistence makes a difference.
    """
    kept: dict[tuple, Variant] = {}
    for variant in tried:
        tiles = replace(variant, persistent=False).grid(n, sms)
        resident, loops = min(variant.ctas, -(-tiles // sms)), tiles > sms * variant.ctas
        shape = (variant.threads, variant.accesses, variant.no_allocate, variant.stages, variant.tile)
        kept.setdefault((shape, resident, loops and variant.persistent), variant)
    return list(kept.values())


def compiled(texts: Iterable[str], arch: int) -> dict[str, bytes]:
    """Return the machine code of each text, compiled side by side, which needs no GPU; NVRTC releases the GIL."""
    texts = list(dict.fromkeys(texts))
    with ThreadPoolExecutor(WORKERS) as pool:
        return dict(zip(texts, pool.map(lambda text: _machine_code(text, arch), texts), strict=True))


def _machine_code(text: str, arch: int) -> bytes:
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(text, "roof.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("--std=c++17", "-default-device", f"-arch=sm_{arch}"))
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"bench: NVRTC rejected a roof:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


class Kernels:
    """The variants on this GPU, all of them compiled."""

    def __init__(self) -> None:
        import cupy

        device = cupy.cuda.Device()
        self.arch, self.sms = int(device.compute_capability), device.attributes["MultiProcessorCount"]
        self.variants = {reads: variants(reads, self.arch) for reads in (1, 2)}
        everything = [variant for of_reads in self.variants.values() for variant in of_reads]
        self._code = compiled((variant.text for variant in everything), self.arch)
        self._loaded: dict[Variant, Any] = {}

    def call(self, variant: Variant, a: Any, b: Any, out: Any) -> Callable[[], None]:
        """Return a call that reads a (and b) and writes out, CuPy arrays of equal size, but no tail below 16 bytes."""
        function, n = self._function(variant), out.nbytes // PACK
        grid, shared = (variant.grid(n, self.sms),), variant.dynamic_shared
        arguments = (a.data.ptr, (a if b is None else b).data.ptr, out.data.ptr, n)
        return lambda: function(grid, (variant.threads,), arguments, shared)

    def _function(self, variant: Variant) -> Any:
        if variant not in self._loaded:
            import cupy

            module = cupy.cuda.Module()
            module.load(self._code[variant.text])  # once for each variant, as shared memory is an attribute of a kernel
            function = module.get_function("stream")
            driver = cupy.cuda.driver
            shared = variant.dynamic_shared
            if shared:  # even 48 KB may be too much by default, beside the ring's barriers
                driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
                driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
            self._loaded[variant] = function
        return self._loaded[variant]
