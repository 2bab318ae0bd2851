// dweight = Σ_rows dy * xhat and dbias = Σ_rows dy by columns: whole sums of few rows, and partial ones of rows that
// are too long for norm_backward.cu.
#pragma once
#include "norms/gradients.cuh"
#include "rows/load.cuh"
#include "rows/rows.cuh"
#include "norms/statistics.cuh"

namespace cunorm {

// The sums that the threads of a CTA hold, one vector of columns each, on their way out. kLanes threads beside each
// other hold different columns, the kRows such row groups the same ones.
template <int kLanes, int kRows, int kVectorSize, class Compute>
struct ColumnSums {
  static constexpr int kThreads = kLanes * kRows;
  static constexpr int kColumns = kLanes * kVectorSize;
  // Row groups that are left once those of a warp are added up by shuffles.
  static constexpr int kHolders = kLanes < 32 ? kThreads / 32 : kRows;
  using Own = Compute[1][kVectorSize];
  using Totals = Compute[kHolders][kColumns];

  template <class... Stores>
  DEVICE static void store(Own (&sums)[kArrays<Sums<Stores...>>], int64 column, int valid, Sums<Stores...> stores) {
    if constexpr (kHolders == 1) {
      store_own(sums, column, valid, stores);
    } else {
      __shared__ Totals totals[sizeof...(Stores)];
#pragma unroll
      for (int k = 0; k < static_cast<int>(sizeof...(Stores)); ++k) {
#pragma unroll
        for (int i = 0; i < kVectorSize; ++i) {
          Compute& sum = sums[k][0][i];
#pragma unroll
          for (int mask = kLanes; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
          if (kLanes >= 32 || threadIdx.x % 32 < kLanes) {
            totals[k][threadIdx.x / (kLanes < 32 ? 32 : kLanes)][threadIdx.x % kLanes * kVectorSize + i] = sum;
          }
        }
      }
      __syncthreads();
      store_totals(totals, 0, column - threadIdx.x % kLanes * kVectorSize, stores);
    }
  }

 private:
  DEVICE static void store_own(const Own*, int64, int, Sums<>) {}
  template <class First, class... Others>
  DEVICE static void store_own(const Own* sums, int64 column, int valid, Sums<First, Others...> stores) {
    stores.first.of_group(blockIdx.y).vector(column, sums[0][0], valid);
    store_own(sums + 1, column, valid, stores.others);
  }

  DEVICE static void store_totals(const Totals*, int, int64, Sums<>) {}
  template <class First, class... Others>
  DEVICE static void store_totals(const Totals* totals, int k, int64 column, Sums<First, Others...> stores) {
    // Each gradient by threads of its own.
    for (int own = (threadIdx.x + k * (kThreads - kColumns % kThreads)) % kThreads; own < kColumns; own += kThreads) {
      if (column + own >= First::kCols) continue;
      Compute total = totals[k][0][own];
#pragma unroll
      for (int other = 1; other < kHolders; ++other) total += totals[k][other][own];
      stores.first.of_group(blockIdx.y).value(First::position(column + own), total);
    }
    store_totals(totals, k + 1, column, stores.others);
  }
};

// A thread owns one vector of the columns that `block` says and takes every kRows-th row of its group; blockIdx.y is
// the group, of gridDim.y. Several rows are loaded at once, kAhead bytes or two: the compiler, which does not know
// how many rows there are, would wait for each.
template <class Norm, int kAhead, int64 kCols, int kLanes, int kRows, int kVectorSize, class Compute, class Operation,
          class Matrices, class Columns, class Sums, class WhichRows>
DEVICE void column_gradients(int64 block, Operation operation, Matrices matrices, Columns columns, Sums sums_to,
                             const Compute* mean, const Compute* rstd, int64 rows, WhichRows which_rows) {
  constexpr int kBytes = kVectorSize * Matrices::kColumnBytes;
  constexpr int kBatch = kAhead / kBytes > 2 ? kAhead / kBytes : 2;
  const int64 column = (block * kLanes + threadIdx.x % kLanes) * kVectorSize;
  const int64 left = kCols - column;
  const int valid = left < 0 ? 0 : left < kVectorSize ? static_cast<int>(left) : kVectorSize;
  next_kernel_may_begin();
  Compute sums[kArrays<Sums>][1][kVectorSize] = {}, no_results[1][kVectorSize];
  typename Columns::Packed column_vector;
  Compute column_values[kArrays<Columns>][kVectorSize];
  columns.fetch(column_vector, 0, column, valid);
  columns.unpack(column_vector, column_values);
  using SavedRow = typename Norm::template SavedRow<Compute>;
  const int64 step = static_cast<int64>(gridDim.y) * kRows;
  const int64 count = which_rows.count(rows);
  for (int64 first = blockIdx.y * kRows + threadIdx.x / kLanes; first < count; first += kBatch * step) {
    typename Matrices::Packed vectors[kBatch];
    SavedRow saved[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64 position = first + b * step, row = which_rows.of(position);
      matrices.fetch(vectors[b], row, column, position < count ? valid : 0);
      if (Operation::kOfXhat && position < count) saved[b] = SavedRow::of(mean, rstd, row);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * step >= count) break;
      Compute values[kArrays<Matrices>][kVectorSize];
      matrices.unpack(vectors[b], values);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        const Compute xhat = Operation::kOfXhat ? saved[b].xhat(operation.source(values, column_values, i)) : 0;
        operation.early(xhat, values, column_values, i, 0, sums, no_results);
      }
    }
  }
  ColumnSums<kLanes, kRows, kVectorSize, Compute>::store(sums, column, valid, sums_to);
}

}  // namespace cunorm
