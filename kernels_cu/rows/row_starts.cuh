// Where the rows of a matrix begin, in elements.
#pragma once
#include "rows/platform.cuh"

namespace cunorm {

// `stride` apart,
template <bool kTwoStrides>
struct RowStarts {
  int64 stride;
  DEVICE int64 of(int64 row) const { return row * stride; }
};

// row / n for rows below 2^32: `reciprocal` is 2^63 / n, rounded up.
DEVICE int64 quotient(int64 row, int64 reciprocal) {
  const auto number = static_cast<unsigned long long>(static_cast<uint32>(row));
  const auto low = number * static_cast<uint32>(reciprocal);
  const auto high = number * static_cast<uint32>(reciprocal >> 32);
  return static_cast<int64>((high + (low >> 32)) >> 31);
}

// or with a gap after every so many, as the heads of a packed QKV lie. How many gaps there are before a row is a
// product: to divide by a number that only the launch knows would take longer than to load the row.
template <>
struct RowStarts<true> {
  int64 stride;
  int64 gap;
  int64 reciprocal;  // of the number of rows between two gaps, times 2^63 and rounded up
  DEVICE int64 of(int64 row) const { return row * stride + gaps_before(row) * gap; }
  DEVICE int64 gaps_before(int64 row) const { return quotient(row, reciprocal); }
};

// Where the values begin that a row's group shares. `inner` rows share it, and after `groups` such runs the first comes
// again.
struct GroupStarts {
  int64 stride;
  int64 groups;
  int64 reciprocal;         // of inner
  int64 period_reciprocal;  // of inner * groups
  DEVICE int64 of(int64 row) const {
    return (quotient(row, reciprocal) - quotient(row, period_reciprocal) * groups) * stride;
  }
};

}  // namespace cunorm
