// dweight = Σ_rows dy * xhat and dbias = Σ_rows dy: partial sums by columns for rows too long for norm_backward.cu, and
// the last sum over partial rows, in a fixed order: the same input gives the same bits.
#pragma once
#include "gradients.cuh"
#include "load_store.cuh"
#include "statistics.cuh"

namespace cunorm {

template <int kPack, class Compute>
DEVICE void store_column_sums(int64, int, const Compute (*)[1][kPack], Sums<>) {}
template <int kPack, class Compute, class First, class... Others>
DEVICE void store_column_sums(int64 column, int valid, const Compute (*sums)[1][kPack], Sums<First, Others...> stores) {
  stores.first.of_group(blockIdx.y).pack(column, sums[0][0], valid);
  store_column_sums<kPack>(column, valid, sums + 1, stores.others);
}

// A thread owns one pack of columns; blockIdx.y is the group, which takes every gridDim.y-th row. 128 bytes of rows are
// asked for at once: the compiler, which does not know how many rows there are, would wait for each.
template <class Norm, int64 kCols, int kPack, class Compute, class Operation, class Matrices, class Columns, class Sums>
DEVICE void column_gradients(Operation operation, Matrices matrices, Columns columns, Sums sums_to, const Compute* mean,
                             const Compute* rstd, int64 rows) {
  constexpr int kBytes = kPack * Matrices::kColumnBytes;
  constexpr int kBatch = kBytes <= 64 ? 128 / kBytes : 2;
  const int64 column = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack;
  if (column >= kCols) return;
  const int valid = kCols - column < kPack ? static_cast<int>(kCols - column) : kPack;
  Compute sums[kArrays<Sums>][1][kPack] = {};
  typename Columns::Packed column_pack;
  Compute column_values[kArrays<Columns>][kPack];
  columns.fetch(column_pack, 0, column, valid);
  columns.unpack(column_pack, column_values);
  using SavedRow = typename Norm::template SavedRow<Compute>;
  for (int64 first = blockIdx.y; first < rows; first += kBatch * gridDim.y) {
    typename Matrices::Packed packs[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64 row = first + b * gridDim.y;
      matrices.fetch(packs[b], row, column, row < rows ? valid : 0);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64 row = first + b * gridDim.y;
      if (row >= rows) break;
      Compute values[kArrays<Matrices>][kPack];
      matrices.unpack(packs[b], values);
      const SavedRow saved = Operation::kOfXhat ? SavedRow::of(mean, rstd, row) : SavedRow{};
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const Compute xhat = Operation::kOfXhat ? saved.xhat(operation.source(values, column_values, i)) : 0;
        operation.early(xhat, values, column_values, i, 0, sums);
      }
    }
  }
  store_column_sums<kPack>(column, valid, sums, sums_to);
}

// gradient[column] = Σ_group partials[group][column]. kLanes threads (a power of two) read kSumColumns each; the
// CTA's kRows such sets of threads take every kRows-th partial row, and are added up at the end. The partial rows were
// written in packs of kPack.
template <int kLanes, int kRows, int kPack, class Compute, class Gradient>
DEVICE void sum_partials(const Compute* partials, Gradient* gradient, int64 groups, int64 cols) {
  constexpr int kOwn = kSumColumns;
  constexpr int kColumns = kLanes * kOwn;  // of a CTA
  // Sets that are left once those of a warp are added up by shuffles.
  constexpr int kSums = kLanes < 32 ? kRows * kLanes / 32 : kRows;
  static_assert(kSums > 1 || kRows == 1);
  const PartialRow<kPack> row{cols};
  const int lane = threadIdx.x % kLanes;
  const int64 first = static_cast<int64>(blockIdx.x) * kColumns;  // in the order of a partial row
  const int64 own = first + lane * kOwn;
  // Packs of two may leave half of the last four unwritten.
  const int written = kPack < kOwn && row.packs() * kPack - own < kOwn ? kPack : kOwn;
  Compute sum[kOwn] = {};
  if (own < row.stride()) {
#pragma unroll 8
    for (int64 group = threadIdx.x / kLanes; group < groups; group += kRows) {
      Pack<Compute, kOwn> pack;
      Compute values[kOwn];
      load_pack<true, Cache::kStreamed>(pack, partials + group * row.stride(), own, written);
      unpack(pack, values);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) sum[i] += values[i];
    }
  }
  if constexpr (kSums == 1) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int64 column = row.column(own + i);
      if (own < row.stride() && column < cols) store_value(gradient + column, sum[i]);
    }
  } else {
    __shared__ Compute sums[kSums][kColumns];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int mask = kLanes; mask < 32; mask *= 2) sum[i] += shuffle_xor(sum[i], mask);
      if (kLanes >= 32 || threadIdx.x % 32 < kLanes)
        sums[threadIdx.x / (kLanes < 32 ? 32 : kLanes)][lane * kOwn + i] = sum[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kColumns && first + i < row.stride(); i += kLanes * kRows) {
      Compute total = sums[0][i];
#pragma unroll
      for (int other = 1; other < kSums; ++other) total += sums[other][i];
      const int64 column = row.column(first + i);
      if (column < cols) store_value(gradient + column, total);
    }
  }
}

}  // namespace cunorm
