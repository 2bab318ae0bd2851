// A vector: the neighbouring columns that one thread reads at once (16 bytes of x). Vectors stay in registers in their
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

template <class T, int kVectorSize>
struct Vector {
  static constexpr int kWords = (kVectorSize * sizeof(T) + 3) / 4;
  uint32 words[kWords];
};
template <int kVectorSize>
struct Vector<Absent, kVectorSize> {};

template <class Compute, class T, int kVectorSize>
DEVICE void unpack(const Vector<T, kVectorSize>& vector, Compute (&values)[kVectorSize]) {
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) {
    if constexpr (sizeof(T) == 8) {
      values[i] = static_cast<Compute>(words_to_double(vector.words[2 * i], vector.words[2 * i + 1]));
    } else if constexpr (sizeof(T) == 4) {
      values[i] = word_to_float(vector.words[i]);
    } else {
      values[i] = i % 2 ? T::decode_high(vector.words[i / 2]) : T::decode_low(vector.words[i / 2]);
    }
  }
}

// The values of a list of arrays for a vector: [array][column]. An empty list has one array that nobody reads.
template <class List>
constexpr int kArrays = List::kCount > 0 ? List::kCount : 1;

// Between two uses of a vector: without it the compiler keeps the unpacked values instead, twice the registers.
template <class T, int kVectorSize>
DEVICE void keep_packed(Vector<T, kVectorSize>& vector) {
  if constexpr (kPresent<T>) {
#pragma unroll
    for (int i = 0; i < Vector<T, kVectorSize>::kWords; ++i) forget(vector.words[i]);
  }
}

// Σ over a vector, as a tree: in a chain of additions of like numbers every rounding may go the same way.
template <class Compute, int kVectorSize>
DEVICE Compute sum(const Compute (&values)[kVectorSize]) {
  Compute sums[kVectorSize];
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) sums[i] = values[i];
#pragma unroll
  for (int step = 1; step < kVectorSize; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kVectorSize; i += 2 * step) sums[i] += sums[i + step];
  }
  return sums[0];
}

// Σ a * b over a vector, likewise.
template <class Compute, int kVectorSize>
DEVICE Compute dot(const Compute (&a)[kVectorSize], const Compute (&b)[kVectorSize]) {
  Compute sums[kVectorSize / 2];
#pragma unroll
  for (int i = 0; i < kVectorSize / 2; ++i) sums[i] = multiply_add(a[2 * i], b[2 * i], a[2 * i + 1] * b[2 * i + 1]);
#pragma unroll
  for (int step = 1; step < kVectorSize / 2; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kVectorSize / 2; i += 2 * step) sums[i] += sums[i + step];
  }
  return sums[0];
}

// The one rounding: Compute to the storage format, to nearest even.
template <class T, class Compute, int kVectorSize>
DEVICE Vector<T, kVectorSize> pack_values(const Compute (&values)[kVectorSize]) {
  Vector<T, kVectorSize> vector;
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) {
    if constexpr (sizeof(T) == 8) {
      double_to_words(values[i], vector.words[2 * i], vector.words[2 * i + 1]);
    } else if constexpr (sizeof(T) == 4) {
      vector.words[i] = float_to_word(static_cast<float>(values[i]));
    } else if constexpr (sizeof(T) == 1) {
      if (i % 2) {
        const uint32 pair = T::encode_pair(values[i - 1], values[i]);
        vector.words[i / 4] = i % 4 == 1 ? pair : vector.words[i / 4] | pair << 16;
      }
    } else if (i % 2) {
      vector.words[i / 2] = T::encode_word(before_narrowing(values[i - 1]), before_narrowing(values[i]));
    }
  }
  return vector;
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
