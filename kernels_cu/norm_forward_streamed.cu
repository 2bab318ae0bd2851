// LayerNorm and RMSNorm forward for rows that no register file holds: one CTA a row, the row read twice (the second
// time from L2 where it fits). Formulas as in norm_forward.cu.
#pragma once
#include "load_store.cuh"
#include "statistics.cuh"

namespace cunorm {

// Shape describes one step along the row: kThreads threads, one pack each.
template <class Norm, int64 kCols, class Shape, class Compute, class Load, class Store>
DEVICE void norm_forward_streamed(Load load, Store store, Compute* mean, Compute* rstd, int64 rows, Compute eps) {
  constexpr int kPack = Shape::kPack;
  constexpr int64 kStep = static_cast<int64>(Shape::kThreads) * kPack;
  using Exchange = RowExchange<Shape, 1, Norm::kRunningValues, Compute>;
  __shared__ Exchange exchange;

  const int64 first_column = static_cast<int64>(threadIdx.x) * kPack;
  const auto valid_at = [](int64 column) {
    return kCols % kPack == 0 || kCols - column >= kPack ? kPack : static_cast<int>(kCols - column);
  };
  int turn = 0;
  for (int64 row = blockIdx.x; row < rows; row += gridDim.x, ++turn) {
    typename Norm::template Running<Compute> running;
#pragma unroll 4
    for (int64 column = first_column; column < kCols; column += kStep) {
      const int valid = valid_at(column);
      typename Load::Packed x;
      Compute values[kPack];
      load.fetch(x, row, column, valid);
      load.unpack(x, values);
      running.add(values, valid);
    }
    Compute published[Norm::kRunningValues], part[Norm::kValues];
    running.publish(published);
    exchange.publish(turn, 0, published);
    running.template merge<Exchange, kCols>(part, exchange.collect(turn));
    const auto statistics = Norm::template finish<kCols>(part, eps);

    if (threadIdx.x == 0) {
      if constexpr (Norm::kHasMean) {
        if (mean != nullptr) mean[row] = statistics.mean();
      }
      if (rstd != nullptr) rstd[row] = statistics.rstd;
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
      statistics.normalise(values);
      store.store(row, column, valid, values, operands);
    }
  }
}

}  // namespace cunorm
