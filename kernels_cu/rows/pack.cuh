// A pack: the neighbouring columns that one thread reads at once (16 bytes of x). Packs stay in registers in their
// storage format and become float (double for float64) only where arithmetic needs them, so a row of 8192 bfloat16
// takes half the registers that its float values would.
#pragma once
#include "rows/platform.cuh"

namespace cunorm {

// The element type of an array that was not given: it occupies no registers and nothing is loaded.
struct Absent {};

template <class T>
constexpr bool kPresent = true;
template <>
constexpr bool kPresent<Absent> = false;

template <class T, int kPack>
struct Pack {
  static constexpr int kWords = (kPack * sizeof(T) + 3) / 4;
  uint32 words[kWords];
};
template <int kPack>
struct Pack<Absent, kPack> {};

template <class Compute, class T, int kPack>
DEVICE void unpack(const Pack<T, kPack>& pack, Compute (&values)[kPack]) {
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    if constexpr (sizeof(T) == 8) {
      values[i] = static_cast<Compute>(words_to_double(pack.words[2 * i], pack.words[2 * i + 1]));
    } else if constexpr (sizeof(T) == 4) {
      values[i] = word_to_float(pack.words[i]);
    } else {
      values[i] = i % 2 ? T::decode_high(pack.words[i / 2]) : T::decode_low(pack.words[i / 2]);
    }
  }
}

// The values of a list of arrays for a pack: [array][column]. An empty list has one array that nobody reads.
template <class List>
constexpr int kArrays = List::kCount > 0 ? List::kCount : 1;

// Between two uses of a pack: without it the compiler keeps the unpacked values instead, twice the registers.
template <class T, int kPack>
DEVICE void stay_packed(Pack<T, kPack>& pack) {
  if constexpr (kPresent<T>) {
#pragma unroll
    for (int i = 0; i < Pack<T, kPack>::kWords; ++i) forget(pack.words[i]);
  }
}

// Σ over a pack, as a tree: in a chain of additions of like numbers every rounding may go the same way.
template <class Compute, int kPack>
DEVICE Compute sum(const Compute (&values)[kPack]) {
  Compute sums[kPack];
#pragma unroll
  for (int i = 0; i < kPack; ++i) sums[i] = values[i];
#pragma unroll
  for (int step = 1; step < kPack; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kPack; i += 2 * step) sums[i] += sums[i + step];
  }
  return sums[0];
}

// Σ a * b over a pack, likewise.
template <class Compute, int kPack>
DEVICE Compute dot(const Compute (&a)[kPack], const Compute (&b)[kPack]) {
  Compute sums[kPack / 2];
#pragma unroll
  for (int i = 0; i < kPack / 2; ++i) sums[i] = multiply_add(a[2 * i], b[2 * i], a[2 * i + 1] * b[2 * i + 1]);
#pragma unroll
  for (int step = 1; step < kPack / 2; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kPack / 2; i += 2 * step) sums[i] += sums[i + step];
  }
  return sums[0];
}

// The one rounding: Compute to the storage format, to nearest even.
template <class T, class Compute, int kPack>
DEVICE Pack<T, kPack> pack_values(const Compute (&values)[kPack]) {
  Pack<T, kPack> pack;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    if constexpr (sizeof(T) == 8) {
      double_to_words(values[i], pack.words[2 * i], pack.words[2 * i + 1]);
    } else if constexpr (sizeof(T) == 4) {
      pack.words[i] = float_to_word(static_cast<float>(values[i]));
    } else if constexpr (sizeof(T) == 1) {
      if (i % 2) {
        const uint32 pair = T::encode_pair(values[i - 1], values[i]);
        pack.words[i / 4] = i % 4 == 1 ? pair : pack.words[i / 4] | pair << 16;
      }
    } else if (i % 2) {
      pack.words[i / 2] = T::encode_word(before_narrowing(values[i - 1]), before_narrowing(values[i]));
    }
  }
  return pack;
}

// A value as the storage format has it.
template <class T, class Compute>
DEVICE Compute rounded(Compute value) {
  if constexpr (sizeof(T) == 2) {
    return T::decode_low(T::encode_word(before_narrowing(value), 0));  // a word of one takes four times as long
  } else {
    return static_cast<T>(value);
  }
}

}  // namespace cunorm
