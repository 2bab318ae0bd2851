// Everything that is spelled differently on different hardware: number formats, vector loads and stores,
// shuffles, barriers, clusters. All inline PTX of the project lives here, so that a CPU build needs to
// replace this file alone. No CUDA header is included: NVRTC then compiles a kernel in under 0.1 s.
#pragma once

#define DEVICE __device__ __forceinline__

namespace cunorm {

using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;

// Storage formats of 16 bits; arithmetic happens in float. A 32-bit word holds two values, the first in the low half.
struct half {
  uint16 bits;

  DEVICE static float decode(uint16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  DEVICE static uint16 encode(float value) {
    uint16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  DEVICE static float decode_low(uint32 word) { return decode(static_cast<uint16>(word)); }
  DEVICE static float decode_high(uint32 word) { return decode(static_cast<uint16>(word >> 16)); }
  DEVICE static uint32 encode_word(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return encode(low) | static_cast<uint32>(encode(high)) << 16;
#endif
  }
};

struct bfloat16 {
  uint16 bits;

  DEVICE static uint16 encode(float value) {
#if __CUDA_ARCH__ >= 800
    uint16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    const uint32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN stays NaN
    return static_cast<uint16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
  }
  DEVICE static float decode_low(uint32 word) { return __uint_as_float(word << 16); }
  DEVICE static float decode_high(uint32 word) { return __uint_as_float(word & 0xffff0000u); }
  DEVICE static uint32 encode_word(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return encode(low) | static_cast<uint32>(encode(high)) << 16;
#endif
  }
};

// Two numbers of 8 bits, the first in the low byte; what is too large becomes the largest.
#if __CUDA_ARCH__ >= 890
constexpr bool kFloat8Instructions = true;
DEVICE uint32 encode_e4m3_pair(float low, float high) {
  uint16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE uint32 encode_e5m2_pair(float low, float high) {
  uint16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
#else
constexpr bool kFloat8Instructions = false;
DEVICE uint32 encode_e4m3_pair(float, float) { return 0; }
DEVICE uint32 encode_e5m2_pair(float, float) { return 0; }
#endif

DEVICE float word_to_float(uint32 word) { return __uint_as_float(word); }
DEVICE uint32 float_to_word(float value) { return __float_as_uint(value); }
DEVICE double words_to_double(uint32 low, uint32 high) {
  return __hiloint2double(static_cast<int>(high), static_cast<int>(low));
}
DEVICE void double_to_words(double value, uint32& low, uint32& high) {
  low = static_cast<uint32>(__double2loint(value));
  high = static_cast<uint32>(__double2hiint(value));
}

// Of two numbers of 16 bits in a word, each the larger, without a sign.
DEVICE uint32 larger_halves(uint32 a, uint32 b) {
#if __CUDA_ARCH__ >= 900
  uint32 larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  const uint32 high = a >> 16 > b >> 16 ? a : b, low = (a & 0xffff) > (b & 0xffff) ? a : b;
  return (high & 0xffff0000u) | (low & 0xffff);
#endif
}

// The larger of |a| and |b|; NaN where either is. On Hopper one instruction; elsewhere ptxas spilled 4 to 36 bytes
// beside it.
DEVICE float larger_magnitude(float a, float b) {
#if __CUDA_ARCH__ == 900
  float larger;
  asm("{\n"
      ".reg .f32 a, b;\n"
      "abs.f32 a, %1;\n"
      "abs.f32 b, %2;\n"
      "max.NaN.f32 %0, a, b;\n"
      "}\n"
      : "=f"(larger)
      : "f"(a), "f"(b));
  return larger;
#else
  const uint32 left = __float_as_uint(a) & 0x7fffffff, right = __float_as_uint(b) & 0x7fffffff;
  return __uint_as_float(left > right ? left : right);
#endif
}

// a * b + c, rounded once. Kernels are compiled with -fmad=false: left to itself ptxas fuses a product and a sum in one
// variant of a kernel and not in another, and the same row gets other bits.
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }

// The largest power of two that is no more than n, 0 of 0.
DEVICE int power_of_two_up_to(int n) { return n > 0 ? 1 << (31 - __clz(n)) : 0; }

// To a format of 16 bits by way of float, without rounding twice: the float is cut off and its last bit set if anything
// was lost (round to odd), which leaves the last rounding as it would have been.
DEVICE float before_narrowing(float value) { return value; }
DEVICE float before_narrowing(double value) {
  const float cut = __double2float_rz(value);
  return static_cast<double>(cut) == value || value != value ? cut : __uint_as_float(__float_as_uint(cut) | 1u);
}

// Correctly rounded 1 / sqrt(value).
DEVICE float reciprocal_sqrt(float value) { return __frsqrt_rn(value); }
DEVICE double reciprocal_sqrt(double value) { return 1.0 / sqrt(value); }

// How many bytes an address lies behind a multiple of kBytes.
template <int kBytes>
DEVICE uint32 past_multiple_of(const void* address) {
  return static_cast<uint32>(reinterpret_cast<unsigned long long>(address)) % kBytes;
}

// The 32 bits that begin `bits` % 32 bits after the first of `low`, behind which `high` follows.
DEVICE uint32 funnel_shift(uint32 low, uint32 high, uint32 bits) { return __funnelshift_r(low, high, bits); }

// The same address. Without it the compiler multiplies a row by its stride again for every pack that is read or
// written. (On sm_80 two streamed kernels spilled 4 bytes with it.)
template <class T>
DEVICE T* begin_of_row(T* row) {
#if __CUDA_ARCH__ >= 900
  char* same;
  asm("mov.u64 %0, %1;" : "=l"(same) : "l"(row));
  __builtin_assume(__isGlobal(same));  // of char: NVRTC 13.0 asks of no other pointer
  return reinterpret_cast<T*>(same);
#else
  return row;
#endif
}

// An index in 64 bits that stays so: sums of 32 bits are made wide for every pack, those of 64 are part of an access.
DEVICE int64 wide_index(int index) {
#if __CUDA_ARCH__ >= 900
  int64 wide;
  asm("cvt.s64.s32 %0, %1;" : "=l"(wide) : "r"(index));
  return wide;
#else
  return index;
#endif
}

// Tells the compiler that the word may have changed, so that it keeps nothing it computed from it.
DEVICE void forget(uint32& word) { asm volatile("" : "+r"(word)); }
DEVICE void forget(int64& number) { asm volatile("" : "+l"(number)); }

enum class Cache { kStreamed, kKept };

// kWords 32-bit words from an address aligned to min(16, 4 * kWords) bytes; zeros, and no access, if they are not
// there. kStreamed leaves L1 to data that is read again (weight, bias). Volatile keeps the order in which loads are
// issued. A branch around a load does not: the compiler moved it to behind the first use of other loads, so that rows
// waited for memory twice (forward of 9728 cols 0.74 of the roof on an H200, of 10240, which need no branch, 0.95).
template <Cache kCache, int kWords>
DEVICE void load_words(const void* address, uint32 (&words)[kWords], bool there = true) {
  static_assert(kWords == 1 || kWords == 2 || kWords % 4 == 0, "a vector access moves 4, 8 or 16 bytes");
  const int predicate = there;
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = 0;
  if constexpr (kWords == 1) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.u32 %0, [%1];}"
                 : "+r"(words[0])
                 : "l"(address), "r"(predicate));
  } else if constexpr (kWords == 2) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %3, 0; @p ld.global.v2.u32 {%0, %1}, [%2];}"
                 : "+r"(words[0]), "+r"(words[1])
                 : "l"(address), "r"(predicate));
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const char* from = static_cast<const char*>(address) + 4 * i;
      if constexpr (kCache == Cache::kStreamed) {
        asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];}"
                     : "+r"(words[i]), "+r"(words[i + 1]), "+r"(words[i + 2]), "+r"(words[i + 3])
                     : "l"(from), "r"(predicate));
      } else {
        asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
                     : "+r"(words[i]), "+r"(words[i + 1]), "+r"(words[i + 2]), "+r"(words[i + 3])
                     : "l"(from), "r"(predicate));
      }
    }
  }
}

// The aligned words of kUnit bytes that hold `bytes` bytes `position` bytes behind `start`, of which position is a
// multiple. What lies beside these bytes in the first and the last word comes with them; a word that holds none of them
// is not read. So nothing is touched beyond an array but what shares 16 bytes with it: no page ends between them.
template <Cache kCache, int kUnit, bool kAligned, int kWords>
DEVICE void load_covering_words(const void* start, int64 position, int bytes, uint32 (&words)[kWords]) {
  const uint32 offset = kAligned ? 0 : past_multiple_of<kUnit>(start);
  const char* const first = begin_of_row(static_cast<const char*>(start) - offset);
  uint32 last = (offset + bytes - 1) / kUnit * kUnit;
  // Or what depends on it alone is kept from row to row: with eight packs of float64 8 bytes were spilled.
  if constexpr (!kAligned && kUnit > 4) forget(last);
#pragma unroll
  for (uint32 i = 0; i < 4 * kWords; i += kUnit) {
    uint32 unit[kUnit / 4];
    if constexpr (kAligned) {
      load_words<kCache>(first + position + i, unit, static_cast<int>(i) < bytes);
    } else {
      // The last word once more takes no predicate, and no zeros for what is not read.
      load_words<kCache>(first + (i < last ? i : last) + position, unit, bytes > 0);
    }
#pragma unroll
    for (int word = 0; word < kUnit / 4; ++word) words[i / 4 + word] = unit[word];
  }
}

// The part of shared memory whose size the launch decides. Asynchronous copies need its alignment: at 16 bytes past a
// multiple of 32 backward of 65536 x 1024 took 122 us instead of 99 on an H200.
DEVICE char* dynamic_shared() {
  extern __shared__ __align__(kSharedAlignment) char memory[];
  return memory;
}

DEVICE uint32 shared_address(const void* place) { return static_cast<uint32>(__cvta_generic_to_shared(place)); }

// The same from shared memory.
template <int kWords>
DEVICE void load_shared_words(const void* address, uint32 (&words)[kWords]) {
  const uint32 from = shared_address(address);
  if constexpr (kWords == 1) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(from));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from));
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3])
                   : "r"(from + 4 * i));
    }
  }
}

template <int kWords>
DEVICE void store_shared_words(void* address, const uint32 (&words)[kWords]) {
  const uint32 to = shared_address(address);
  if constexpr (kWords == 1) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(words[0]) : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(words[0]), "r"(words[1]) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + 4 * i), "r"(words[i]), "r"(words[i + 1]),
                   "r"(words[i + 2]), "r"(words[i + 3])
                   : "memory");
    }
  }
}

// Asynchronous copies of kBytes (4, 8 or a multiple of 16) from global to shared memory, which pass no register. A
// group is what was asked for between two commits; copies_wait returns when all but the last kPending groups of this
// thread have come. Before sm_80 they are not asynchronous. kNeighbours: L2 fetches the 256 bytes around too (backward
// of 128 columns 0.89 -> 0.94 of the roof on an H200, of 4096 columns no gain). kCached: by way of L1, for what all
// CTAs read: past it all SMs ask L2 for the same few lines, and backward of 26215 x 320 with a float32 weight took 40
// us more.
enum class Fetch { kAlone, kNeighbours, kCached };
template <int kBytes, Fetch kFetch>
DEVICE void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  const uint32 place = shared_address(to);
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes; i += 16) {
      const char* source = static_cast<const char*>(from) + i;
      if constexpr (kFetch == Fetch::kCached) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(place + i), "l"(source) : "memory");
      } else if constexpr (kFetch == Fetch::kNeighbours) {
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(place + i), "l"(source) : "memory");
      } else {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place + i), "l"(source) : "memory");
      }
    }
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(from), "n"(kBytes) : "memory");
  }
#else
  uint32 words[kBytes / 4];
  load_words<Cache::kStreamed>(from, words);
  store_shared_words(to, words);
#endif
}
// The same where some of the bytes may lie beside the array (load_covering_words says why they may be read).
template <int kBytes, Fetch kFetch>
DEVICE void copy_covering_async(void* to, const void* from) {
  copy_async<kBytes, kFetch>(to, from);
}
// Asks for what will be read from L1.
// kCount elements, whole lines of 128 bytes, that nobody will read: they are lost, and L2 need not write them to
// memory.
template <int kCount, class T>
DEVICE void discard(const T* first) {
  static_assert(kCount * sizeof(T) % 128 == 0);
#if __CUDA_ARCH__ >= 800
#pragma unroll
  for (int i = 0; i < kCount; i += 128 / sizeof(T)) {
    asm volatile("discard.global.L2 [%0], 128;" ::"l"(first + i) : "memory");
  }
#endif
}
DEVICE void prefetch(const void* address) { asm volatile("prefetch.global.L1 [%0];" ::"l"(address)); }
DEVICE void copies_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending>
DEVICE void copies_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// kStreamed leaves L1 alone: y at 0.97 -> 1.03 of the roof for 4096 columns of bfloat16 on an H200.
template <Cache kCache, int kWords>
DEVICE void store_words(void* address, const uint32 (&words)[kWords]) {
  if constexpr (kWords == 1) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(words[0]) : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(words[0]), "r"(words[1]) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      char* to = static_cast<char*>(address) + 4 * i;
      if constexpr (kCache == Cache::kStreamed) {
        asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[i]),
                     "r"(words[i + 1]), "r"(words[i + 2]), "r"(words[i + 3])
                     : "memory");
      } else {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[i]), "r"(words[i + 1]),
                     "r"(words[i + 2]), "r"(words[i + 3])
                     : "memory");
      }
    }
  }
}

template <class T>
DEVICE T shuffle_xor(T value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

// That of the next lane; the last one gets its own.
template <class T>
DEVICE T shuffle_down(T value) {
  return __shfl_down_sync(0xffffffffu, value, 1);
}

// That of any lane.
template <class T>
DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

// The largest of a warp's.
DEVICE uint32 largest_of_warp(uint32 value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, value);
#else
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const uint32 other = shuffle_xor(value, mask);
    value = value > other ? value : other;
  }
  return value;
#endif
}

DEVICE void warp_barrier() { __syncwarp(); }

// A barrier among `threads` threads of the CTA (whole warps). Groups that meet apart use different ids, 1 to 15: 0 is
// __syncthreads.
DEVICE void barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// A kernel that was launched to begin before the one in front of it ends (launch.py says which) waits here until that
// one has ended and its results can be seen; otherwise there is nothing to wait for. The kernel in front says, in every
// CTA, from where on the next may begin.
DEVICE void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void next_kernel_may_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Clusters: CTAs that run side by side on sm_90 and later and reach each other's shared memory.
DEVICE int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

// Until every CTA of the cluster runs, its shared memory must not be written from outside. Relaxed, as initialised
// mailboxes are known to the cluster by a fence of their own: a release waits for the first rows of all threads,
// backward of 8 M elements, 16384 columns, 19.7 us and 20.2.
DEVICE void cluster_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A mailbox counts the bytes that arrive in this CTA's shared memory from the cluster (an mbarrier): one thread says
// how many to expect, every reader waits for them. Unlike barrier.cluster, which is also a fence, neither side waits
// for loads and stores to global memory that are under way: backward of 4096 x 65536
// took 838 us instead of 1085 on an H200.
struct Mailbox {
  unsigned long long state;

  DEVICE void init() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address()) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  DEVICE void expect(int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
#endif
  }
  // The first wait has phase 0, the next 1, then 0 again.
  DEVICE void wait(int phase) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(address()),
        "r"(phase)
        : "memory");
#endif
  }
  // Writes to the place that `slot`, a shared variable of this CTA, has in the CTA `rank`, and counts there.
  DEVICE void send(float* slot, int rank, const float (&values)[1]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(mapped(slot, rank)),
                 "f"(values[0]), "r"(mapped(&state, rank))
                 : "memory");
#endif
  }
  DEVICE void send(float* slot, int rank, const float (&values)[2]) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(mapped(slot, rank)),
        "f"(values[0]), "f"(values[1]), "r"(mapped(&state, rank))
        : "memory");
#endif
  }
  DEVICE void send(float* slot, int rank, const float (&values)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     mapped(slot, rank)),
                 "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(mapped(&state, rank))
                 : "memory");
#endif
  }
  template <int kCount>
  DEVICE void send(double* slot, int rank, const double (&values)[kCount]) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];" ::"r"(mapped(slot + k, rank)),
          "d"(values[k]), "r"(mapped(&state, rank))
          : "memory");
    }
#endif
  }

 private:
#if __CUDA_ARCH__ >= 900
  DEVICE uint32 address() { return shared_address(&state); }
  DEVICE static uint32 mapped(const void* place, int rank) {
    uint32 result;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(shared_address(place)), "r"(rank));
    return result;
  }
#endif
};

// Functions of the mathematics library, for functions.cuh.
// Within an ulp, and 0 of infinity. A division has a branch with a call for its rare cases, between any two of which
// the compiler moves nothing: the backward pass of rms_norm_gated had 32 in a row of 1024 columns.
DEVICE float reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
DEVICE double reciprocal(double value) { return 1.0 / value; }
DEVICE float exponential(float value) { return expf(value); }
DEVICE double exponential(double value) { return exp(value); }
// Two instructions, exp's own has eight: off by |value| + 4 units in the last place at most, which is little beside 1.
DEVICE float quick_exponential(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value * 1.4426950408889634f));
  return result;
}
DEVICE double quick_exponential(double value) { return exp(value); }
DEVICE float logarithm(float value) { return logf(value); }
DEVICE double logarithm(double value) { return log(value); }
DEVICE float square_root(float value) { return sqrtf(value); }
DEVICE double square_root(double value) { return sqrt(value); }
DEVICE float hyperbolic_tangent(float value) { return tanhf(value); }
DEVICE double hyperbolic_tangent(double value) { return tanh(value); }
DEVICE float error_function(float value) { return erff(value); }
DEVICE double error_function(double value) { return erf(value); }
DEVICE float absolute(float value) { return fabsf(value); }
DEVICE double absolute(double value) { return fabs(value); }

}  // namespace cunorm
