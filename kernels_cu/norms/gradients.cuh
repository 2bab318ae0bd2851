// dweight and dbias on their way out of a kernel that adds them up.
#pragma once
#include "rows/vector_access.cuh"
#include "rows/partial_sums.cuh"
#include "norms/statistics.cuh"

namespace cunorm {

// The gradient of s: what comes through the norm. (What somebody asks of s itself the operation adds.)
template <class Operation, class SavedRow, class Compute, class Matrices, class Columns>
DEVICE Compute gradient_of_s(const Operation& operation, const SavedRow& saved, const Projection<Compute>& projection,
                             Compute xhat, const Matrices& matrices, const Columns& columns, int i) {
  if constexpr (!Operation::kOfS) {
    return 0;
  } else {
    const Compute taken = projection.at(operation.source(matrices, columns, i));
    return operation.without(xhat, matrices, columns, i, taken) * saved.rstd;
  }
}

// Where the sums of a group (a CTA or a cluster) go: to a partial row,
template <class Compute, int kVectorSize, int64 kCols_>
struct StorePartial {
  using Row = PartialSums<kVectorSize>;
  static constexpr int64 kCols = kCols_;
  Compute* data;

  DEVICE StorePartial of_group(int64 group) const { return {data + group * Row{kCols}.stride()}; }
  DEVICE void vector(int64 column, const Compute (&sums)[kVectorSize], int valid) const {
    if (valid == 0) return;
#pragma unroll
    for (int piece = 0; piece < kVectorSize / Row::kPiece; ++piece) {
      Compute values[Row::kPiece];
#pragma unroll
      for (int i = 0; i < Row::kPiece; ++i) values[i] = sums[piece * Row::kPiece + i];
      store_vector<Access::kWhole, Cache::kKept>(data + Row{kCols}.position(column + piece * Row::kPiece),
                                                 pack_values<Compute>(values), Row::kPiece);
    }
  }
  DEVICE static int64 position(int64 column) { return Row{kCols}.position(column); }
  DEVICE void value(int64 position, Compute sum) const { data[position] = sum; }
};

// or to dweight or dbias itself, where there is one group.
template <class T, int kVectorSize, int64 kCols_, Access kAccess>
struct StoreGradient {
  static constexpr int64 kCols = kCols_;
  T* data;

  DEVICE StoreGradient of_group(int64) const { return *this; }
  template <class Compute>
  DEVICE void vector(int64 column, const Compute (&sums)[kVectorSize], int valid) const {
    store_vector<kAccess, Cache::kKept>(data + column, pack_values<T>(sums), valid);
  }
  DEVICE static int64 position(int64 column) { return column; }
  template <class Compute>
  DEVICE void value(int64 position, Compute sum) const {
    store_value(data + position, sum);
  }
};

// Several sums that are stored one after the other.
template <class... Stores>
struct Sums;

template <>
struct Sums<> {
  static constexpr int kCount = 0;
};

template <class First, class... Others>
struct Sums<First, Others...> {
  static constexpr int kCount = 1 + sizeof...(Others);
  First first;
  Sums<Others...> others;
};

}  // namespace cunorm
