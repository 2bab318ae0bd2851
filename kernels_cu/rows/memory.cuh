// Global and shared memory: loads and stores of 4 to 16 bytes, asynchronous copies.
#pragma once
#include "rows/numbers.cuh"

namespace cunorm {

// How many bytes an address lies behind a multiple of kBytes.
template <int kBytes>
DEVICE uint32 past_multiple_of(const void* address) {
  return static_cast<uint32>(reinterpret_cast<unsigned long long>(address)) % kBytes;
}

// The same address. Without it the compiler multiplies a row by its stride again for every vector that is read or
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

// An index in 64 bits that stays so: sums of 32 bits are made wide for every vector, those of 64 are part of an access.
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

// The aligned words of kUnit bytes that hold `bytes` bytes `position` bytes behind `start`, of which position is a
// multiple. What lies beside these bytes in the first and the last word comes with them; a word that holds none of them
// is not read. So nothing is touched beyond an array but what shares 16 bytes with it: no page ends between them.
template <Cache kCache, int kUnit, bool kAligned, int kWords>
DEVICE void load_covering_words(const void* start, int64 position, int bytes, uint32 (&words)[kWords]) {
  const uint32 offset = kAligned ? 0 : past_multiple_of<kUnit>(start);
  const char* const first = begin_of_row(static_cast<const char*>(start) - offset);
  uint32 last = (offset + bytes - 1) / kUnit * kUnit;
  // Or what depends on it alone is kept from row to row: with eight vectors of float64 8 bytes were spilled.
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

// kWords 32-bit words of shared memory, aligned as those of global memory.
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
// group is what was started between two commits; copies_wait returns when all but the last kPending groups of this
// thread have come. Before sm_80 they are not asynchronous. kNeighbours: L2 fetches the 256 bytes around too (backward
// of 128 columns 0.89 -> 0.94 of the roof on an H200, of 4096 columns no gain). kCached: by way of L1, for what all
// CTAs read: past it all SMs ask L2 for the same few lines, and backward of 26215 x 320 with a float32 weight took
// 40 us more.
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
// Asks for what will be read from L1.
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

}  // namespace cunorm
