// dweight and dbias of the partial rows that the kernels before it left, in a fixed order: the same input gives the
// same bits.
#pragma once
#include "rows/vector_access.cuh"
#include "rows/partial_sums.cuh"

namespace cunorm {

// gradient[column] = Σ_group partials[group][column]. kLanes threads (a power of two) read kSumColumns each; the
// CTA's kRows such sets of threads take every kRows-th partial row, and are added up at the end. `block` says which
// columns. The partial rows were written in vectors of kVectorSize. kOwnsPartials: nobody else reads them.
template <int kLanes, int kRows, int kVectorSize, bool kOwnsPartials, bool kNextBegins, class Compute, class Gradient>
DEVICE void sum_partials(int64 block, const Compute* partials, Gradient* gradient, int64 groups, int64 cols) {
  constexpr int kOwn = kSumColumns;
  constexpr int kColumns = kLanes * kOwn;  // of a CTA
  // Sets that are left once those of a warp are added up by shuffles.
  constexpr int kSums = kLanes < 32 ? kRows * kLanes / 32 : kRows;
  static_assert(kSums > 1 || kRows == 1);
  const PartialSums<kVectorSize> row{cols};
  const int lane = threadIdx.x % kLanes;
  const int64 first = block * kColumns;  // in the order of a partial row
  const int64 own = first + lane * kOwn;
  // Vectors of two may leave half of the last four unwritten.
  const int written = kVectorSize < kOwn && row.vectors() * kVectorSize - own < kOwn ? kVectorSize : kOwn;
  Compute sum[kOwn] = {};
  wait_for_kernel_before();  // before partial rows are read, and a gradient written that somebody may still read
  if constexpr (kNextBegins) next_kernel_may_begin();
  if (own < row.buffers()) {
#pragma unroll 8
    for (int64 group = threadIdx.x / kLanes; group < groups; group += kRows) {
      Vector<Compute, kOwn> vector;
      Compute values[kOwn];
      load_vector<kVectorSize >= kOwn ? Access::kWhole : Access::kAligned, Cache::kStreamed>(
          vector, partials + group * row.stride(), own, written);
      unpack(vector, values);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) sum[i] += values[i];
    }
  }
  if constexpr (kSums == 1) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int64 column = row.column(own + i);
      if (own < row.buffers() && column < cols) store_value(gradient + column, sum[i]);
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
    for (int i = threadIdx.x; i < kColumns && first + i < row.buffers(); i += kLanes * kRows) {
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
  if (kOwnsPartials && cols > 1024 && threadIdx.x % kLineLanes == 0 && own < row.buffers()) {
    for (int64 group = threadIdx.x / kLanes; group < groups; group += kRows) {
      discard<kLineColumns>(partials + group * row.stride() + own);
    }
  }
}

}  // namespace cunorm
