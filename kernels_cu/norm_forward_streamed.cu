// LayerNorm and RMSNorm forward for rows that no register file holds: one CTA a row, the row read twice (the second
// time from L2 where it fits). Formulas as in norm_forward.cu.
#pragma once
#include "load_store.cuh"
#include "moments.cuh"

namespace cunorm {

// Shape describes one step along the row: kThreads threads, one pack each.
template <bool kRms, int64 kCols, class Shape, class Compute, class Load, class Store>
DEVICE void norm_forward_streamed(Load load, Store store, Compute* mean, Compute* rstd, int64 rows, Compute eps) {
  constexpr int kPack = Shape::kPack;
  constexpr int64 kStep = static_cast<int64>(Shape::kThreads) * kPack;
  // What a thread's running moments cover varies: counts are published too.
  using Exchange = RowExchange<Shape, 1, kRms ? 1 : 4, Compute>;
  __shared__ Exchange exchange;

  const int64 first_column = static_cast<int64>(threadIdx.x) * kPack;
  const auto valid_at = [](int64 column) {
    return kCols % kPack == 0 || kCols - column >= kPack ? kPack : static_cast<int>(kCols - column);
  };
  int turn = 0;
  for (int64 row = blockIdx.x; row < rows; row += gridDim.x, ++turn) {
    RunningMoments<Compute> running;
    CompensatedSum<Compute> row_squares;
#pragma unroll 4
    for (int64 column = first_column; column < kCols; column += kStep) {
      const int valid = valid_at(column);
      typename Load::Packed x;
      Compute values[kPack];
      load.fetch(x, row, column, valid);
      load.unpack(x, values);
      if constexpr (kRms) {
        row_squares.add(dot(values, values));
      } else {
        Compute total = 0;
#pragma unroll
        for (int i = 0; i < kPack; ++i) total += values[i];
        const auto count = static_cast<Compute>(valid);
        running.merge(count, moments_about<1, kPack>(total / count, [&](auto use) { use(values, valid); }));
      }
    }

    RowMoments<Compute> row_moments;
    if constexpr (kRms) {
      exchange.publish(turn, 0, {group_sum<32>(row_squares.total())});
      const auto& slots = exchange.collect(turn);
      const Compute squares = Exchange::sum([&](int slot) { return slots[0][slot]; });
      row_moments = {0, 0, reciprocal_sqrt(squares / kCols + eps)};
    } else {
      // Lanes to warp: all about the warp's mean.
      const auto lane = running.moments();
      const Compute count = group_sum<32>(running.count);
      const Compute pivot = group_sum<32>(running.count * lane.pivot) / (count > 0 ? count : 1);
      const auto shifted = about(lane, running.count, pivot);
      exchange.publish(turn, 0, {pivot, group_sum<32>(shifted.sum), group_sum<32>(shifted.squares), count});
      const auto& slots = exchange.collect(turn);
      row_moments =
          finish(merge_slots<Exchange>(slots, static_cast<Compute>(kCols), [&](int slot) { return slots[3][slot]; }),
                 static_cast<Compute>(kCols), eps);
    }

    if (threadIdx.x == 0) {
      if (mean != nullptr) mean[row] = row_moments.pivot + row_moments.residual;
      if (rstd != nullptr) rstd[row] = row_moments.rstd;
    }
#pragma unroll 4
    for (int64 column = first_column; column < kCols; column += kStep) {
      const int valid = valid_at(column);
      typename Load::Packed x;
      typename Store::Operands operands;
      Compute values[kPack];
      load.fetch(x, row, column, valid);
      store.fetch(operands, column, valid);
      load.unpack(x, values);
      normalise(values, row_moments);
      store.store(row, column, valid, values, operands);
    }
  }
}

}  // namespace cunorm
