// y in 8 bits, and the scales that make numbers of it again:
//   bytes = round(y * q),  q = min(F / max|y|, 2^100),  scale = 1 / q
// with F the largest number of the format and the maximum over the columns that share a scale: a row, or a block of it.
// Where q is to be a power of two it is the one below.
// Of a zero row the scale is 1; where a number is infinite or NaN it is NaN, so that whoever multiplies by it sees it.
#pragma once
#include "rows/vector_access.cuh"
#include "rows/row.cuh"

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

// max|value| of a vector; values past `valid` do not count.
template <int kVectorSize>
DEVICE float largest_of(const float (&values)[kVectorSize], int valid) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) largest = larger_magnitude(largest, i < valid ? values[i] : 0);
  return largest;
}

// Of groups of kLanes neighbouring lanes. The numbers are not negative.
template <int kLanes>
DEVICE float group_largest(float value) {
  if constexpr (kLanes == 32) return word_to_float(largest_of_warp(float_to_word(value)));
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value = larger(value, shuffle_xor(value, mask));
  return value;
}

// Of kCount numbers of each lane, a power of two: of number i it is in the i-th kCount-th part of the lanes. A step
// halves the numbers and the lanes: by kCount group_largest four numbers of 16 lanes took 32 instructions, so 16.
template <int kLanes, int kCount>
DEVICE float group_largest(float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    return group_largest<kLanes>(values[0]);
  } else {
    const bool upper = threadIdx.x & kLanes / 2;
    float halves[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float low = values[i], high = values[i + kCount / 2];
      halves[i] = larger(upper ? high : low, shuffle_xor(upper ? low : high, kLanes / 2));
    }
    return group_largest<kLanes / 2>(halves);
  }
}

// What the warps of a row published (RowExchange).
template <class Exchange>
DEVICE float largest_of_slots(const typename Exchange::Slots& slots) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float found = 0;
#pragma unroll
  for (int slot = 0; slot < Exchange::kSlots; slot += 32) {
    if (slot + lane < Exchange::kSlots) found = larger(found, slots(0, slot + lane));
  }
  return group_largest<32>(found);
}

struct Scale {
  float multiplier;  // q
  float scale;

  template <class Format, bool kPowerOf2 = false>
  DEVICE static Scale of(float largest) {
    constexpr float kMostMultiplier = 0x1p100f;
    constexpr float kOnePartInLargest = 1 / Format::kLargest;
    if (largest < Format::kLargest / kMostMultiplier) return {kMostMultiplier, largest == 0 ? 1 : 1 / kMostMultiplier};
    const float quotient = divided(Format::kLargest, largest);
    const float not_finite = largest - largest;  // NaN, else 0
    if constexpr (kPowerOf2) {
      const float power = word_to_float(float_to_word(quotient) & 0x7f800000);
      return {power + (quotient - quotient), 1 / power + not_finite};  // NaN stays NaN
    }
    // As divided, but for what the first product lost.
    const float close = largest * kOnePartInLargest;
    const float lost = multiply_add(-close, Format::kLargest, largest);
    return {quotient, multiply_add(lost, kOnePartInLargest, close) + not_finite};
  }

 private:
  // F / largest, rounded once, for F the largest of a format and a quotient of no more than 2^100: 0 for infinity, NaN
  // for NaN. The mantissas are divided (all 2^23 of them give what a division does) and then the exponents: a division
  // has a branch for its rare cases, between two of which the compiler moves nothing.
  DEVICE static float divided(float dividend, float largest) {
    const uint32 bits = float_to_word(largest), infinite = 0x7f800000;
    const float mantissa = word_to_float((bits & 0x007fffff) | 0x3f800000);
    const float close = reciprocal(mantissa);
    const float part = multiply_add(multiply_add(-mantissa, close, 1.0f), close, close);
    const float quotient = dividend * part;
    const float rounded = multiply_add(multiply_add(-mantissa, quotient, dividend), part, quotient);
    const float finite = word_to_float(float_to_word(rounded) + (127u << 23) - (bits & infinite));
    return bits < infinite ? finite : reciprocal(largest);
  }
};

// y with a scale for each row (kBlock = 0) or for each kBlock columns of it, found while the row is in registers; and
// beside it y as it is, unless Wide stores nothing.
template <class Format, class Bytes, class Wide, int kBlock_, int64 kBlocks>
struct StoreScaled {
  static constexpr int kVectorSize = Bytes::kVectorSize;
  static constexpr bool kScaled = true;
  static constexpr bool kTogether = true;  // all lanes of a warp look for the largest
  static constexpr int kBlock = kBlock_;
  Bytes bytes;
  Wide wide;
  float* scales;  // [row][block]

  // The scale of what has this largest value; the thread that is `first` writes it.
  DEVICE float multiplier(int64 row, int64 block, float largest, bool first) const {
    const Scale scale = Scale::of<Format>(largest);
    if (first) scales[row * kBlocks + block] = scale.scale;
    return scale.multiplier;
  }
  DEVICE void store(int64 row, int64 column, int valid, const float (&values)[kVectorSize], float multiplier) const {
    float scaled[kVectorSize];
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) scaled[i] = values[i] * multiplier;
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
  static constexpr int kVectorSize = Bytes::kVectorSize;
  static constexpr bool kScaled = false;
  static constexpr bool kTogether = Bytes::kTogether || Wide::kTogether;
  Bytes bytes;
  Wide wide;
  float multiplier;

  DEVICE void store(int64 row, int64 column, int valid, const float (&values)[kVectorSize]) const {
    float scaled[kVectorSize];
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) scaled[i] = values[i] * multiplier;
    wide.store(row, column, valid, values);
    bytes.store(row, column, valid, scaled);
  }
};

// Stores a row of which a thread holds kVectors vectors: y_of(p, valid, values) makes the values of one.
// `largest_of_row` makes of the largest of a warp that of the row, and is called by all threads of the row or by none.
template <class Shape, class Store, class YOf, class LargestOfRow>
DEVICE void store_scaled(const Store& store, int64 row, int rank, bool active, YOf y_of, LargestOfRow largest_of_row) {
  // Neighbouring lanes hold neighbouring vectors: a block is of kLanes lanes and, of a short row, kGroup vectors of
  // each.
  constexpr int kVectorSize = Shape::kVectorSize;
  constexpr int kVectors = Shape::kVectors;
  constexpr bool kRow = Store::kBlock == 0;
  constexpr int kBlockLanes = kRow ? Shape::kLanes : Store::kBlock / kVectorSize;
  constexpr int kLanes = kBlockLanes < Shape::kLanes ? kBlockLanes : Shape::kLanes;
  constexpr int kGroup = kRow ? kVectors : kBlockLanes / kLanes;
  static_assert(kRow || Shape::kStep % Store::kBlock == 0 || Store::kBlock % Shape::kStep == 0);
  // All of a block is in registers: made twice, once for the largest, it would be too much arithmetic. The scales of as
  // many blocks as are kBlockValues are found at once, each by lanes of its own: one after the other they took a
  // division each, and LayerNorm of 1024 columns 63.5 us instead of 58.3.
  constexpr int kOwn = (kVectors + kGroup - 1) / kGroup;
  constexpr int kMost = kGroup * kVectorSize < kBlockValues ? kBlockValues / (kGroup * kVectorSize) : 1;
  constexpr int kIterations = (kOwn + kMost - 1) / kMost;
  constexpr int kBlocks = (kOwn + kIterations - 1) / kIterations;
  constexpr int kParts = power_of_two_from(kBlocks);
  constexpr int kPartLanes = kLanes / kParts;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, part = lane / kPartLanes;
#pragma unroll
  for (int start = 0; start < kOwn; start += kBlocks) {
    float y[kBlocks * kGroup][kVectorSize], largest[kParts] = {};
    const auto for_each_vector = [&](auto use) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const int p = (start + b) * kGroup + i;
          if (p < kVectors) use(b, p, active ? Shape::valid(rank, p) : 0, y[b * kGroup + i]);
        }
      }
    };
    for_each_vector([&](int b, int p, int valid, float (&values)[kVectorSize]) {
      y_of(p, valid, values);
      largest[b] = larger(largest[b], largest_of(values, valid));
    });
    float of_part = group_largest<kLanes>(largest);
    int64 block = 0;
    bool first = active && lane % kPartLanes == 0;
    if constexpr (kRow) {
      of_part = largest_of_row(of_part);
      first = active && rank == 0 && threadIdx.x % Shape::kThreads == 0;
    } else {
      block = Shape::column(rank, (start + part) * kGroup) / Store::kBlock;
      first = first && part < kBlocks && block * Store::kBlock < Shape::kCols;
    }
    const float multiplier = store.multiplier(row, block, of_part, first);
    for_each_vector([&](int b, int p, int valid, float (&values)[kVectorSize]) {
      const int holder = static_cast<int>(threadIdx.x) % 32 - lane + b * kPartLanes;
      store.store(row, Shape::column(rank, p), valid, values, kParts == 1 ? multiplier : shuffle(multiplier, holder));
    });
  }
}

}  // namespace cunorm
