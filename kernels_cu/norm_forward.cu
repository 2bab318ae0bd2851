// LayerNorm and RMSNorm forward, rows held in registers: x is read once, y written once.
//   LayerNorm   y = (x - mean(x)) * rstd * weight + bias,  rstd = 1 / sqrt(var(x) + eps)
//   RMSNorm     y = x * rstd * weight,                     rstd = 1 / sqrt(mean(x²) + eps)
// The tiers (part of a warp, warp, CTA, cluster) are the same code for different RowShapes.
#pragma once
#include "load_store.cuh"
#include "moments.cuh"

namespace cunorm {

// Every CTA takes kRows rows at a time. mean and rstd may be null: then nobody will read them.
template <bool kRms, class Shape, int kRows, class Compute, class Load, class Store>
DEVICE void norm_forward(Load load, Store store, Compute* mean, Compute* rstd, int64 rows, Compute eps) {
  constexpr int kPack = Shape::kPack;
  constexpr int kPacks = Shape::kPacks;
  using Exchange = RowExchange<Shape, kRms ? 1 : 3, Compute>;
  __shared__ Exchange exchange;
  static_assert(kRows == 1 || Shape::kSlots == 1, "several rows share a CTA only if a warp holds each");

  // Weight and bias are asked for before the reduction where 16 registers hold them.
  constexpr bool kOperandsEarly = kPacks * sizeof(typename Store::Operands) <= 64;

  const int rank = Shape::kCluster > 1 ? cluster_rank() : 0;
  const int slot = rank * Shape::kWarps + (Shape::kWarps > 1 ? threadIdx.x / 32 : 0);
  const int64 row_step = static_cast<int64>(gridDim.x / Shape::kCluster) * kRows;
  // No CTA may write to another's shared memory before that one runs; the wait is behind the first loads.
  if constexpr (Shape::kCluster > 1) cluster_arrive();

  int set = 0;
  bool first = true;
  for (int64 base = static_cast<int64>(blockIdx.x / Shape::kCluster) * kRows; base < rows; base += row_step) {
    const int64 row = base + threadIdx.x / Shape::kThreads;
    const bool active = kRows == 1 || row < rows;

    typename Load::Packed x[kPacks];
    typename Store::Operands operands[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = Shape::column(rank, p);
      load.fetch(x[p], row, column, active ? Shape::valid(column) : 0);
    }
    const auto fetch_operands = [&](int p) {
      const int column = Shape::column(rank, p);
      store.fetch(operands[p], column, Shape::valid(column));
    };
    if constexpr (kOperandsEarly) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) fetch_operands(p);
    }

    const auto for_each = [&](auto use) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int valid = Shape::valid(Shape::column(rank, p));
        Compute values[kPack];
        load.unpack(x[p], values);
        load.stay_packed(x[p]);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          if (i < valid) use(values[i]);
        }
      }
    };

    RowMoments<Compute> row_moments;
    if constexpr (kRms) {
      Compute squares = 0;
      for_each([&](Compute value) { squares += value * value; });
      squares = group_sum<Shape::kLanes>(squares);
      if constexpr (Shape::kSlots > 1) {
        if (Shape::kCluster > 1 && first) cluster_wait();
        exchange.publish(set, rank, {squares});
        squares = Exchange::sum([&](int other) { return exchange.slots[set][0][other]; });
      }
      row_moments = {0, 0, reciprocal_sqrt(squares / Shape::kCols + eps)};
    } else {
      auto moments = group_moments<Shape::kLanes, Compute>(static_cast<Compute>(Shape::slot_columns(slot)), for_each);
      if constexpr (Shape::kSlots > 1) {
        if (Shape::kCluster > 1 && first) cluster_wait();
        exchange.publish(set, rank, {moments.pivot, moments.sum, moments.squares});
        moments = merge_slots<Exchange, Compute>(exchange.slots[set], static_cast<Compute>(Shape::kCols),
                                                 Shape::slot_columns);
      }
      row_moments = finish(moments, static_cast<Compute>(Shape::kCols), eps);
    }
    set ^= 1;
    first = false;

    if (active && rank == 0 && threadIdx.x % Shape::kThreads == 0) {
      if (mean != nullptr) mean[row] = row_moments.pivot + row_moments.residual;
      if (rstd != nullptr) rstd[row] = row_moments.rstd;
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (!kOperandsEarly) fetch_operands(p);
      const int column = Shape::column(rank, p);
      Compute values[kPack];
      load.unpack(x[p], values);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        values[i] = ((values[i] - row_moments.pivot) - row_moments.residual) * row_moments.rstd;
      }
      store.store(row, column, active ? Shape::valid(column) : 0, values, operands[p]);
    }
  }
  // A cluster that got no row still owes the wait.
  if (Shape::kCluster > 1 && first) cluster_wait();
}

}  // namespace cunorm
