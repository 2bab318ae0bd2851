// dweight = Σ_rows dy * xhat and dbias = Σ_rows dy: partial sums by columns for rows too long for norm_backward.cu, and
// the last sum over partial rows, in a fixed order: the same input gives the same bits.
#pragma once
#include "gradients.cuh"
#include "load_store.cuh"
#include "row.cuh"

namespace cunorm {

// A thread owns one pack of columns; blockIdx.y is the group, which takes every gridDim.y-th row.
// dweight_partials and dbias_partials: [gridDim.y][partial_stride(kCols)].
template <bool kRms, int64 kCols, int kPack, class Needs, class Compute, class LoadX, class LoadDy>
DEVICE void weight_gradient_partials(LoadX load_x, LoadDy load_dy, const Compute* mean, const Compute* rstd,
                                     Compute* dweight_partials, Compute* dbias_partials, int64 rows) {
  const int64 column = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack;
  if (column >= kCols) return;
  const int valid = kCols - column < kPack ? static_cast<int>(kCols - column) : kPack;
  Compute dweight[kPack] = {};
  Compute dbias[kPack] = {};
#pragma unroll 4
  for (int64 row = blockIdx.y; row < rows; row += gridDim.y) {
    typename LoadX::Packed x;
    typename LoadDy::Packed dy;
    Compute xhat[kPack], grad[kPack];
    load_x.fetch(x, row, column, Needs::kDweight ? valid : 0);
    load_dy.fetch(dy, row, column, valid);
    const Compute row_mean = kRms ? 0 : mean[row];
    const Compute row_rstd = rstd[row];
    load_x.unpack(x, xhat);
    load_dy.unpack(dy, grad);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      dweight[i] += grad[i] * ((xhat[i] - row_mean) * row_rstd);
      dbias[i] += grad[i];
    }
  }
  constexpr bool kAligned = kCols % kPack == 0;
  const int64 offset = static_cast<int64>(blockIdx.y) * partial_stride(kCols) + column;
  if constexpr (Needs::kDweight)
    store_pack<kAligned, Cache::kKept>(dweight_partials + offset, pack_values<Compute>(dweight), valid);
  if constexpr (Needs::kDbias)
    store_pack<kAligned, Cache::kKept>(dbias_partials + offset, pack_values<Compute>(dbias), valid);
}

// gradient[column] = Σ_group partials[group][column], for a CTA's 32 columns. A warp reads 4 groups at a time, 8 lanes
// each with 4 columns; then the sums of the warps are added up. A partial row is whole packs of 4.
template <class Compute, class Gradient>
DEVICE void sum_partials(const Compute* partials, Gradient* gradient, int64 groups, int64 cols) {
  constexpr int kPack = 4;
  constexpr int kLanes = 32 / kPack;  // read a row
  __shared__ Compute sums[32][33];    // a column more, against bank conflicts
  const int warps = blockDim.x / 32;
  const int lane = threadIdx.x % kLanes;
  const int64 column = static_cast<int64>(blockIdx.x) * 32 + lane * kPack;
  const int valid = cols - column < kPack ? static_cast<int>(cols - column) : kPack;
  Compute sum[kPack] = {};
  if (column < cols) {
#pragma unroll 8
    for (int64 group = threadIdx.x / kLanes; group < groups; group += blockDim.x / kLanes) {
      Pack<Compute, kPack> pack;
      Compute values[kPack];
      load_pack<true, Cache::kStreamed>(pack, partials + group * partial_stride(cols) + column, valid);
      unpack(pack, values);
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum[i] += values[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
#pragma unroll
    for (int mask = kLanes; mask < 32; mask *= 2) sum[i] += shuffle_xor(sum[i], mask);
    if (threadIdx.x % 32 < kLanes) sums[threadIdx.x / 32][lane * kPack + i] = sum[i];
  }
  __syncthreads();
  for (int own = threadIdx.x / 32; own < 32; own += warps) {
    const int other = threadIdx.x % 32;
    const Compute total = group_sum<32>(other < warps ? sums[other][own] : Compute(0));
    const int64 at = static_cast<int64>(blockIdx.x) * 32 + own;
    if (other == 0 && at < cols) store_value(gradient + at, total);
  }
}

}  // namespace cunorm
