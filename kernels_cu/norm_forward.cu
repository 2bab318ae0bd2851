// LayerNorm and RMSNorm forward, rows held in registers or shared memory: x is read once, y written once.
//   LayerNorm   y = (x - mean(x)) * rstd * weight + bias,  rstd = 1 / sqrt(var(x) + eps)
//   RMSNorm     y = x * rstd * weight,                     rstd = 1 / sqrt(mean(x²) + eps)
// The tiers (part of a warp, warp, CTA, cluster) are the same code for different RowShapes.
#pragma once
#include "load_store.cuh"
#include "rows.cuh"
#include "statistics.cuh"

namespace cunorm {

// Every CTA takes kRows rows at a time, which wait in Rows (rows.cuh); with kOnce there are no more. With
// kOperandsStay weight and bias stay in registers from row to row. mean and rstd may be null: then nobody will read
// them.
template <class Norm, class Shape, int kRows, template <class> class Rows, bool kOperandsStay, bool kOnce,
          class Compute, class Load, class Store>
DEVICE void norm_forward(Load load, Store store, Compute* mean, Compute* rstd, int64 rows, Compute eps) {
  constexpr int kPack = Shape::kPack;
  constexpr int kPacks = Shape::kPacks;
  using RowsX = Rows<Load>;
  using Exchange = RowExchange<Shape, kRows, Norm::kValues, Compute>;
  __shared__ Exchange exchange;
  static_assert(kRows == 1 || Shape::kSlots == 1, "several rows share a CTA only if a warp holds each");
  static_assert(RowsX::kAskEarly || Shape::kSlots > 1, "rows are asked for late where warps wait for each other");

  const int rank = Shape::kCluster > 1 ? cluster_rank() : 0;
  const int slot = rank * Shape::kWarps + (Shape::kWarps > 1 ? threadIdx.x / 32 : 0);
  const int64 row_step = static_cast<int64>(gridDim.x / Shape::kCluster) * kRows;
  typename Store::Operands operands[kPacks];
  const auto fetch_operands = [&](int p) { store.fetch(operands[p], Shape::column(rank, p), Shape::valid(rank, p)); };

  int64 row = static_cast<int64>(blockIdx.x / Shape::kCluster) * kRows + threadIdx.x / Shape::kThreads;
  RowsX rows_x(load, rank, rows, 0);
#pragma unroll
  for (int ahead = 0; ahead < RowsX::kAhead; ++ahead) {
    rows_x.ask(row + ahead * row_step, ahead);
    RowsX::sent();
  }
  if constexpr (kOperandsStay) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) fetch_operands(p);
  }
  if constexpr (Shape::kSlots > 1) exchange.start();

  const auto read = [&](int p, Compute(&values)[kPack]) {
    typename Load::Packed x;
    rows_x.read(x, p);
    load.unpack(x, values);
  };
  const auto for_each_pack = [&](auto use) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Compute values[kPack];
      read(p, values);
      rows_x.stay_packed(p);
      const int valid = Shape::valid(rank, p);
      // A cluster's rows are in shared memory: a branch delays no load, and without it ptxas spills 4 to 8 bytes.
      if (Shape::kCluster == 1 || valid > 0) use(values, valid);
    }
  };

  for (int turn = 0; first_of_warp<Shape>(row) < rows; row += row_step, ++turn) {
    const auto ask_next = [&] {
      rows_x.ask(row + RowsX::kAhead * row_step, RowsX::kAhead - 1);
      RowsX::sent();
    };
    RowsX::arrived();
    rows_x.take(row);

    if constexpr (RowsX::kAskEarly) ask_next();
    Compute part[Norm::kValues];
    const auto read_first = [&](Compute(&values)[kPack]) {
      read(0, values);
      rows_x.stay_packed(0);
    };
    Norm::template gather<Shape>(part, slot, read_first, for_each_pack);
    if constexpr (Shape::kSlots > 1) {
      exchange.publish(turn, rank, part);
      if constexpr (!RowsX::kAskEarly) ask_next();
      Norm::template merge<Exchange, Shape::kCols>(part, exchange.collect(turn),
                                                   [](int other) { return Shape::slot_columns(other); });
    }
    const auto statistics = Norm::template finish<Shape::kCols>(part, eps);

    const bool active = Shape::kThreads >= 32 || row < rows;
    if (active && rank == 0 && threadIdx.x % Shape::kThreads == 0) {
      if constexpr (Norm::kHasMean) {
        if (mean != nullptr) mean[row] = statistics.mean();
      }
      if (rstd != nullptr) rstd[row] = statistics.rstd;
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (!kOperandsStay) fetch_operands(p);
      Compute values[kPack];
      read(p, values);
      statistics.normalise(values);
      store.store(row, Shape::column(rank, p), active ? Shape::valid(rank, p) : 0, values, operands[p]);
    }
    if constexpr (kOnce) break;
  }
}

}  // namespace cunorm
