// dweight = Σ_rows dy * xhat and dbias = Σ_rows dy: sums by columns, whole ones of few rows and partial ones of rows
// too long for norm_backward.cu, and the last sum over partial rows, in a fixed order: the same input gives the same
// bits.
#pragma once
#include "gradients.cuh"
#include "load_store.cuh"
#include "rows.cuh"
#include "statistics.cuh"

namespace cunorm {

// The sums that the threads of a CTA hold, one pack of columns each, on their way out. kLanes threads beside each other
// hold different columns, the kRows such row groups the same ones.
template <int kLanes, int kRows, int kPack, class Compute>
struct ColumnSums {
  static constexpr int kThreads = kLanes * kRows;
  static constexpr int kColumns = kLanes * kPack;
  // Row groups that are left once those of a warp are added up by shuffles.
  static constexpr int kHolders = kLanes < 32 ? kThreads / 32 : kRows;
  using Own = Compute[1][kPack];
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
        for (int i = 0; i < kPack; ++i) {
          Compute& sum = sums[k][0][i];
#pragma unroll
          for (int mask = kLanes; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
          if (kLanes >= 32 || threadIdx.x % 32 < kLanes) {
            totals[k][threadIdx.x / (kLanes < 32 ? 32 : kLanes)][threadIdx.x % kLanes * kPack + i] = sum;
          }
        }
      }
      __syncthreads();
      store_totals(totals, 0, column - threadIdx.x % kLanes * kPack, stores);
    }
  }

 private:
  DEVICE static void store_own(const Own*, int64, int, Sums<>) {}
  template <class First, class... Others>
  DEVICE static void store_own(const Own* sums, int64 column, int valid, Sums<First, Others...> stores) {
    stores.first.of_group(blockIdx.y).pack(column, sums[0][0], valid);
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
      stores.first.of_group(blockIdx.y).value(First::place(column + own), total);
    }
    store_totals(totals, k + 1, column, stores.others);
  }
};

// A thread owns one pack of columns and takes every kRows-th row of its group; blockIdx.y is the group, of gridDim.y.
// Several rows are asked for at once, kAhead bytes or two: the compiler, which does not know how many rows there are,
// would wait for each.
template <class Norm, int kAhead, int64 kCols, int kLanes, int kRows, int kPack, class Compute, class Operation,
          class Matrices, class Columns, class Sums, class WhichRows>
DEVICE void column_gradients(Operation operation, Matrices matrices, Columns columns, Sums sums_to, const Compute* mean,
                             const Compute* rstd, int64 rows, WhichRows which_rows) {
  constexpr int kBytes = kPack * Matrices::kColumnBytes;
  constexpr int kBatch = kAhead / kBytes > 2 ? kAhead / kBytes : 2;
  const int64 column = (static_cast<int64>(blockIdx.x) * kLanes + threadIdx.x % kLanes) * kPack;
  const int64 left = kCols - column;
  const int valid = left < 0 ? 0 : left < kPack ? static_cast<int>(left) : kPack;
  next_kernel_may_begin();
  Compute sums[kArrays<Sums>][1][kPack] = {}, no_results[1][kPack];
  typename Columns::Packed column_pack;
  Compute column_values[kArrays<Columns>][kPack];
  columns.fetch(column_pack, 0, column, valid);
  columns.unpack(column_pack, column_values);
  using SavedRow = typename Norm::template SavedRow<Compute>;
  const int64 step = static_cast<int64>(gridDim.y) * kRows;
  const int64 count = which_rows.count(rows);
  for (int64 first = blockIdx.y * kRows + threadIdx.x / kLanes; first < count; first += kBatch * step) {
    typename Matrices::Packed packs[kBatch];
    SavedRow saved[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64 place = first + b * step, row = which_rows.of(place);
      matrices.fetch(packs[b], row, column, place < count ? valid : 0);
      if (Operation::kOfXhat && place < count) saved[b] = SavedRow::of(mean, rstd, row);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * step >= count) break;
      Compute values[kArrays<Matrices>][kPack];
      matrices.unpack(packs[b], values);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const Compute xhat = Operation::kOfXhat ? saved[b].xhat(operation.source(values, column_values, i)) : 0;
        operation.early(xhat, values, column_values, i, 0, sums, no_results);
      }
    }
  }
  ColumnSums<kLanes, kRows, kPack, Compute>::store(sums, column, valid, sums_to);
}

// gradient[column] = Σ_group partials[group][column]. kLanes threads (a power of two) read kSumColumns each; the
// CTA's kRows such sets of threads take every kRows-th partial row, and are added up at the end. The partial rows were
// written in packs of kPack. kOwnsPartials: nobody else reads them.
template <int kLanes, int kRows, int kPack, bool kOwnsPartials, class Compute, class Gradient>
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
  wait_for_kernel_before();  // before partial rows are read, and a gradient written that somebody may still read
  if (own < row.places()) {
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
      if (own < row.places() && column < cols) store_value(gradient + column, sum[i]);
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
    for (int i = threadIdx.x; i < kColumns && first + i < row.places(); i += kLanes * kRows) {
      Compute total = sums[0][i];
#pragma unroll
      for (int other = 1; other < kSums; ++other) total += sums[other][i];
      const int64 column = row.column(first + i);
      if (column < cols) store_value(gradient + column, total);
    }
  }
  // What has been read L2 need not write to memory: 7 MB, LayerNorm of 6528 columns. Of short rows there is little.
  constexpr int kLineLanes = kLineColumns / kOwn;
  static_assert(kLanes % kLineLanes == 0, "the lanes that read a line are of one warp");
  warp_barrier();
  if (kOwnsPartials && cols > 1024 && threadIdx.x % kLineLanes == 0 && own < row.places()) {
    for (int64 group = threadIdx.x / kLanes; group < groups; group += kRows) {
      discard<kLineColumns>(partials + group * row.stride() + own);
    }
  }
}

}  // namespace cunorm
