// LayerNorm and RMSNorm backward, rows held in registers: x and dy are read once, dx written once.
//   xhat = (x - mean) * rstd,  g = dy * weight
//   LayerNorm   dx = rstd * (g - c2 - xhat * c1),  c1 = mean(g * xhat), c2 = mean(g)
//   RMSNorm     dx = rstd * (g - xhat * c1)        (mean = 0)
//   dweight = Σ_rows dy * xhat,  dbias = Σ_rows dy
// One persistent kernel: a CTA (or cluster) takes every gridDim-th row, asks for its next rows before it reduces the
// present ones (kPrefetch), and keeps dweight and dbias of its columns in registers. Each writes one partial row at the
// end; weight_gradient.cu adds them up in a fixed order.
#pragma once
#include "gradients.cuh"
#include "load_store.cuh"
#include "row.cuh"

namespace cunorm {

// Adds up what the kRows row groups of a CTA hold for the same columns and writes the sum to partial[kCols].
template <class Shape, int kRows, class Compute>
DEVICE void store_partial(Compute (&sums)[Shape::kPacks][Shape::kPack], int rank, Compute* partial) {
  constexpr int kPack = Shape::kPack;
  // Threads that hold a set of columns once: a row group, or a warp once its row groups are added up by shuffles.
  constexpr int kHolders = Shape::kThreads < 32 && kRows > 1 ? 32 : Shape::kThreads;
  constexpr int kTurns = kRows * Shape::kThreads / kHolders;
  __shared__ Compute total[kTurns > 1 ? Shape::kPacks * Shape::kThreads * kPack : 1];
  if constexpr (kHolders > Shape::kThreads) {
#pragma unroll
    for (int p = 0; p < Shape::kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
#pragma unroll
        for (int mask = Shape::kThreads; mask < 32; mask *= 2) sums[p][i] += shuffle_xor(sums[p][i], mask);
      }
    }
  }
  const int turn = threadIdx.x / kHolders;
  const bool holds = static_cast<int>(threadIdx.x) % kHolders < Shape::kThreads;
#pragma unroll 1
  for (int next = 0; next < kTurns; ++next) {
    if (turn == next && holds) {
#pragma unroll
      for (int p = 0; p < Shape::kPacks; ++p) {
        const int column = Shape::column(rank, p);
        if (kTurns > 1 && next > 0) {
#pragma unroll
          for (int i = 0; i < kPack; ++i) sums[p][i] += total[column + i];
        }
        if (next == kTurns - 1) {
          store_pack<Shape::kWholePacks, Cache::kKept>(partial + column, pack_values<Compute>(sums[p]),
                                                       Shape::valid(column));
        } else {
#pragma unroll
          for (int i = 0; i < kPack; ++i) total[column + i] = sums[p][i];
        }
      }
    }
    if (kTurns > 1) __syncthreads();
  }
}

// dweight_partials and dbias_partials: [groups][kCols], a group being a CTA or a cluster.
template <bool kRms, class Shape, int kRows, bool kPrefetch, class Needs, class Compute, class LoadX, class LoadDy,
          class Scale, class StoreDx>
DEVICE void norm_backward(LoadX load_x, LoadDy load_dy, Scale scale, StoreDx store_dx, const Compute* mean,
                          const Compute* rstd, Compute* dweight_partials, Compute* dbias_partials, int64 rows) {
  constexpr int kPack = Shape::kPack;
  constexpr int kPacks = Shape::kPacks;
  using Exchange = RowExchange<Shape, kRows, kRms ? 1 : 2, Compute>;
  __shared__ Exchange exchanges[kRows];
  Exchange& exchange = exchanges[threadIdx.x / Shape::kThreads];

  const int rank = Shape::kCluster > 1 ? cluster_rank() : 0;
  const int64 group = blockIdx.x / Shape::kCluster;
  const int64 row_step = static_cast<int64>(gridDim.x / Shape::kCluster) * kRows;
  constexpr bool kExchanges = Needs::kDx && Shape::kSlots > 1;
  Compute dweight[kPacks][kPack] = {};
  Compute dbias[kPacks][kPack] = {};

  // The weight stays in registers from row to row where 8 of them hold it.
  constexpr bool kWeightStays = kPacks * sizeof(typename Scale::Operands) <= 32;
  typename Scale::Operands weight[kPacks];
  const auto fetch_weight = [&](int p) {
    const int column = Shape::column(rank, p);
    scale.fetch(weight[p], column, Shape::valid(column));
  };
  if constexpr (kWeightStays) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) fetch_weight(p);
  }

  struct Row {
    typename LoadX::Packed x[kPacks];
    typename LoadDy::Packed dy[kPacks];
    Compute mean = 0;
    Compute rstd = 0;
  };
  // A row past the end counts as zeros.
  const auto fetch = [&](Row& to, int64 row) {
    const bool active = row < rows;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = Shape::column(rank, p);
      const int valid = active ? Shape::valid(column) : 0;
      load_x.fetch(to.x[p], row, column, valid);
      load_dy.fetch(to.dy[p], row, column, valid);
    }
    to.mean = !kRms && active ? mean[row] : 0;
    to.rstd = active ? rstd[row] : 0;
  };

  int64 base = group * kRows;
  Row next;
  if (kPrefetch && base < rows) fetch(next, base + threadIdx.x / Shape::kThreads);
  if constexpr (kExchanges) exchange.start();
  for (int turn = 0; base < rows; base += row_step, ++turn) {
    const int64 row = base + threadIdx.x / Shape::kThreads;
    Row now;
    if constexpr (kPrefetch) {
      now = next;
      if (base + row_step < rows) fetch(next, row + row_step);
    } else {
      fetch(now, row);
    }

    Compute c1 = 0;
    Compute c2 = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Compute xhat[kPack], grad[kPack], g[kPack];
      load_x.unpack(now.x[p], xhat);
      load_dy.unpack(now.dy[p], grad);
      if constexpr (!kWeightStays) fetch_weight(p);
      scale.apply(grad, weight[p], g);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        xhat[i] = (xhat[i] - now.mean) * now.rstd;
        if constexpr (Needs::kDweight) dweight[p][i] += grad[i] * xhat[i];
        if constexpr (Needs::kDbias) dbias[p][i] += grad[i];
        c1 += g[i] * xhat[i];
        if constexpr (!kRms) c2 += g[i];
      }
    }

    if constexpr (Needs::kDx) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        load_x.stay_packed(now.x[p]);
        load_dy.stay_packed(now.dy[p]);
      }
      c1 = group_sum<Shape::kLanes>(c1);
      if constexpr (!kRms) c2 = group_sum<Shape::kLanes>(c2);
      if constexpr (kExchanges && kRms) {
        const auto& slots = exchange.publish(turn, rank, {c1});
        c1 = Exchange::sum([&](int slot) { return slots[0][slot]; });
      } else if constexpr (kExchanges) {
        const auto& slots = exchange.publish(turn, rank, {c1, c2});
        c1 = Exchange::sum([&](int slot) { return slots[0][slot]; });
        c2 = Exchange::sum([&](int slot) { return slots[1][slot]; });
      }
      c1 /= Shape::kCols;
      c2 /= Shape::kCols;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int column = Shape::column(rank, p);
        Compute xhat[kPack], grad[kPack], g[kPack];
        load_x.unpack(now.x[p], xhat);
        load_dy.unpack(now.dy[p], grad);
        if constexpr (!kWeightStays) fetch_weight(p);
        scale.apply(grad, weight[p], g);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          xhat[i] = (xhat[i] - now.mean) * now.rstd;
          g[i] = (g[i] - c2 - xhat[i] * c1) * now.rstd;
        }
        store_dx.store(row, column, row < rows ? Shape::valid(column) : 0, g);
      }
    }
  }

  if constexpr (Needs::kDweight) store_partial<Shape, kRows>(dweight, rank, dweight_partials + group * Shape::kCols);
  if constexpr (Needs::kDbias) store_partial<Shape, kRows>(dbias, rank, dbias_partials + group * Shape::kCols);
}

}  // namespace cunorm
