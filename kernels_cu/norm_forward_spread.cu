// LayerNorm and RMSNorm forward of few rows: what norm_forward.cu computes, to the bit, with a thread for every pack of
// a row, where that kernel gives a thread several. A row alone then waits for a quarter of the instructions.
#pragma once
#include "float8.cuh"
#include "load_store.cuh"
#include "rows.cuh"
#include "statistics.cuh"

namespace cunorm {

// A CTA (or cluster) for every row. Its kPacks * kThreads threads are those of Shape, once for each of their packs: the
// sums that a thread of norm_forward adds its packs to are added up here through shared memory, in the same order.
template <class Norm, class Shape, class Compute, class Operation, class Load, class Beside, class Columns,
          class StoreS, class StoreY>
DEVICE void norm_forward_spread(Operation operation, Load load, Beside beside, Columns columns, StoreS store_s,
                                StoreY store_y, Compute* mean, Compute* rstd, Compute eps) {
  constexpr int kPack = Shape::kPack;
  constexpr int kPacks = Shape::kPacks;
  using Exchange = RowExchange<Shape, 1, Norm::kValues, Compute>;
  __shared__ Exchange exchange;
  __shared__ Compute lane_sums[Norm::kLaneSums][kPacks][Shape::kThreads];

  const int rank = Shape::kCluster > 1 ? cluster_rank() : 0;
  const int64 row = blockIdx.x / Shape::kCluster;
  const int p = static_cast<int>(threadIdx.x) / Shape::kThreads;
  const bool there = Shape::kThreads % 32 == 0 || p < kPacks;  // the last warp may have threads to spare
  const int thread = static_cast<int>(threadIdx.x) % Shape::kThreads;
  const int slot = rank * Shape::kWarps + (Shape::kWarps > 1 ? thread / 32 : 0);
  const int column = Shape::column(rank, p);
  const int valid = Shape::valid(rank, p);

  typename Load::Raw raw, raw_first;
  typename Beside::Packed beside_pack;
  typename Columns::Packed column_pack;
  load.fetch(raw, row, column, valid);
  // Every warp finds the pivot itself: to hand it on would take one more barrier.
  if constexpr (Norm::kHasMean) load.fetch(raw_first, row, Shape::column(rank, 0), Shape::valid(rank, 0));
  beside.fetch(beside_pack, row, column, valid);
  columns.fetch(column_pack, row, column, valid);
  if constexpr (Shape::kSlots > 1) exchange.start();

  Compute values[kPack], pivot = 0;
  const typename Load::Packed s = load.keep(raw, valid);
  if constexpr (Norm::kHasMean) {
    load.unpack(load.keep(raw_first, Shape::valid(rank, 0)), values);
    pivot = Norm::template pivot<Shape>(slot, values);
  }
  load.unpack(s, values);
  Compute sums[Norm::kLaneSums] = {}, part[Norm::kValues];
  Norm::add(sums, values, valid, pivot);
  if constexpr (kPacks > 1) {
#pragma unroll
    for (int k = 0; k < Norm::kLaneSums; ++k) {
      if (there) lane_sums[k][p][thread] = sums[k];
      sums[k] = 0;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < Norm::kLaneSums; ++k) {
#pragma unroll
      for (int other = 0; other < kPacks; ++other) sums[k] += lane_sums[k][other][thread];
    }
  }
  Norm::template gathered<Shape::kLanes>(part, sums, pivot);
  if constexpr (Shape::kSlots > 1) {
    if (p == 0) exchange.publish(0, rank, part);
    Norm::template merge<Exchange, Shape::kCols>(part, exchange.collect(0),
                                                 [](int other) { return Shape::slot_columns(other); });
  }
  const auto statistics = Norm::template finish<Shape::kCols>(part, eps);

  if (rank == 0 && threadIdx.x == 0) {
    if constexpr (Norm::kHasMean) {
      if (mean != nullptr) mean[row] = statistics.mean();
    }
    if (rstd != nullptr) rstd[row] = statistics.rstd;
  }
  Compute beside_values[kArrays<Beside>][kPack], column_values[kArrays<Columns>][kPack];
  store_s.store_packed(row, column, valid, s);
  statistics.normalise(values);
  beside.unpack(beside_pack, beside_values);
  columns.unpack(column_pack, column_values);
#pragma unroll
  for (int i = 0; i < kPack; ++i) values[i] = operation.epilogue(values[i], beside_values, column_values, i);
  store_y.store(row, column, valid, values);
}

}  // namespace cunorm
