// y in 8 bits, and the scales that make numbers of it again:
//   bytes = round(y * q),  q = min(F / max|y|, 2^100),  scale = 1 / q
// with F the largest number of the format and the maximum over the columns that share a scale: a row, or a block of it.
// Where q is to be a power of two it is the one below.
// Of a zero row the scale is 1; where a number is infinite or NaN it is NaN, so that whoever multiplies by it sees it.
#pragma once
#include "load_store.cuh"
#include "row.cuh"

namespace cunorm {

// The bits of the nearest number, of two the even one, where no instruction finds them. Beyond kMost is kMost.
template <int kMantissa, int kBias, uint32 kMost>
DEVICE uint32 encode_float8(float value) {
  constexpr int kDropped = 23 - kMantissa;
  const uint32 word = float_to_word(value), magnitude = word & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;
  uint32 bits;
  if (magnitude < (128u - kBias) << 23) {
    // Below the least normal number: the last bit of this sum counts what the last bit of the format does.
    const float unit = word_to_float((151u - kBias - kMantissa) << 23);
    bits = float_to_word(word_to_float(magnitude) + unit) - float_to_word(unit);
  } else {
    const uint32 rounded = magnitude + (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1);
    bits = (rounded >> kDropped) - ((127u - kBias) << kMantissa);
  }
  return (bits < kMost ? bits : kMost) | (word >> 24 & 0x80);
}

struct float8_e4m3 {
  uint8 bits;
  static constexpr float kLargest = 448;
  DEVICE static uint32 encode_pair(float low, float high) {
    if constexpr (kFloat8Instructions) return encode_e4m3_pair(low, high);
    return encode_float8<3, 7, 0x7e>(low) | encode_float8<3, 7, 0x7e>(high) << 8;
  }
};

struct float8_e5m2 {
  uint8 bits;
  static constexpr float kLargest = 57344;
  DEVICE static uint32 encode_pair(float low, float high) {
    if constexpr (kFloat8Instructions) return encode_e5m2_pair(low, high);
    return encode_float8<2, 15, 0x7b>(low) | encode_float8<2, 15, 0x7b>(high) << 8;
  }
};

// Of numbers that are not negative. NaN is larger than all others, as its bits are.
DEVICE float larger(float a, float b) {
  const uint32 bits = float_to_word(a), other = float_to_word(b);
  return word_to_float(bits > other ? bits : other);
}

// max|value| of a pack; values past `valid` do not count.
template <int kPack>
DEVICE float largest_of(const float (&values)[kPack], int valid) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    largest = larger(largest, i < valid ? word_to_float(float_to_word(values[i]) & 0x7fffffff) : 0);
  }
  return largest;
}

template <int kLanes>
DEVICE float group_largest(float value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value = larger(value, shuffle_xor(value, mask));
  return value;
}

struct Scale {
  float multiplier;  // q
  float scale;

  template <class Format, bool kPowerOf2 = false>
  DEVICE static Scale of(float largest) {
    constexpr float kMostMultiplier = 0x1p100f;
    constexpr float kOnePartInLargest = 1 / Format::kLargest;
    const float quotient = Format::kLargest / largest;  // infinite for zero, 0 for infinity
    if (quotient > kMostMultiplier) return {kMostMultiplier, largest == 0 ? 1 : 1 / kMostMultiplier};
    const float not_finite = largest - largest;  // NaN, else 0
    if constexpr (kPowerOf2) {
      const float power = word_to_float(float_to_word(quotient) & 0x7f800000);
      return {power + (quotient - quotient), 1 / power + not_finite};  // NaN stays NaN
    }
    // As divided, but for what the first product lost: a second division would be a branch.
    const float close = largest * kOnePartInLargest;
    const float lost = multiply_add(-close, Format::kLargest, largest);
    return {quotient, multiply_add(lost, kOnePartInLargest, close) + not_finite};
  }
};

// y with a scale for each row (kBlock = 0) or for each kBlock columns of it, found while the row is in registers; and
// beside it y as it is, unless Wide stores nothing.
template <class Format, class Bytes, class Wide, int kBlock_, int64 kBlocks>
struct StoreScaled {
  static constexpr int kPack = Bytes::kPack;
  static constexpr bool kScaled = true;
  static constexpr bool kTogether = true;  // all lanes of a warp look for the largest
  static constexpr int kBlock = kBlock_;
  Bytes bytes;
  Wide wide;
  float* scales;  // [row][block]

  // The scale of what has this largest value; the thread that is `first` writes it.
  DEVICE float multiplier(int64 row, int64 column, float largest, bool first) const {
    const Scale scale = Scale::of<Format>(largest);
    int64 block = 0;
    if constexpr (kBlock > 0) block = column / kBlock;
    if (first) scales[row * kBlocks + block] = scale.scale;
    return scale.multiplier;
  }
  DEVICE void store(int64 row, int64 column, int valid, const float (&values)[kPack], float multiplier) const {
    float scaled[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) scaled[i] = values[i] * multiplier;
    wide.store(row, column, valid, values);
    bytes.store(row, column, valid, scaled);
  }
};

// Whether a row has one scale.
template <class Store>
constexpr bool kRowScaled = false;
template <class Format, class Bytes, class Wide, int64 kBlocks>
constexpr bool kRowScaled<StoreScaled<Format, Bytes, Wide, 0, kBlocks>> = true;

// y with a scale that is known: one for all.
template <class Bytes, class Wide>
struct StoreByTensor {
  static constexpr int kPack = Bytes::kPack;
  static constexpr bool kScaled = false;
  static constexpr bool kTogether = Bytes::kTogether || Wide::kTogether;
  Bytes bytes;
  Wide wide;
  float multiplier;

  DEVICE void store(int64 row, int64 column, int valid, const float (&values)[kPack]) const {
    float scaled[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) scaled[i] = values[i] * multiplier;
    wide.store(row, column, valid, values);
    bytes.store(row, column, valid, scaled);
  }
};

// Stores a row of which a thread holds kPacks packs: y_of(p, valid, values) makes the values of one. `largest_of_row`
// makes of the largest of a warp that of the row, and is called by all threads of the row or by none.
template <class Shape, class Store, class YOf, class LargestOfRow>
DEVICE void store_scaled(const Store& store, int64 row, int rank, bool active, YOf y_of, LargestOfRow largest_of_row) {
  // Neighbouring lanes hold neighbouring packs: a block is of kLanes lanes and, of a short row, kGroup packs of each.
  constexpr int kPack = Shape::kPack;
  constexpr int kPacks = Shape::kPacks;
  constexpr bool kRow = Store::kBlock == 0;
  constexpr int kBlockLanes = kRow ? Shape::kLanes : Store::kBlock / kPack;
  constexpr int kLanes = kBlockLanes < Shape::kLanes ? kBlockLanes : Shape::kLanes;
  constexpr int kGroup = kRow ? kPacks : kBlockLanes / kLanes;
  static_assert(kRow || Shape::kStep % Store::kBlock == 0 || Store::kBlock % Shape::kStep == 0);
  const int thread = static_cast<int>(threadIdx.x) % Shape::kThreads;
#pragma unroll
  for (int start = 0; start < kPacks; start += kGroup) {
    // All of it is in registers: made twice, once for the largest, it would be too much arithmetic.
    float y[kGroup][kPack], largest = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (start + i >= kPacks) break;
      const int valid = active ? Shape::valid(rank, start + i) : 0;
      y_of(start + i, valid, y[i]);
      largest = larger(largest, largest_of(y[i], valid));
    }
    largest = group_largest<kLanes>(largest);
    if constexpr (kRow) largest = largest_of_row(largest);
    const bool first = kRow ? rank == 0 && thread == 0 : thread % kLanes == 0 && Shape::valid(rank, start) > 0;
    const float multiplier = store.multiplier(row, Shape::column(rank, start), largest, active && first);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (start + i >= kPacks) break;
      const int valid = active ? Shape::valid(rank, start + i) : 0;
      store.store(row, Shape::column(rank, start + i), valid, y[i], multiplier);
    }
  }
}

}  // namespace cunorm
