// LayerNorm and RMSNorm forward for rows that no register file holds: one CTA a row, the row read twice (the second
// time from L2 where it fits). Formulas as in norm_forward.cu.
#pragma once
#include "rows/float8.cuh"
#include "rows/load.cuh"
#include "norms/statistics.cuh"
#include "rows/store.cuh"

namespace cunorm {

// Shape describes one step along the row: kThreads threads, one vector each.
template <class Norm, int64 kCols, class Shape, class Compute, class Operation, class Load, class Beside, class Columns,
          class StoreS, class StoreY>
DEVICE void norm_forward_streamed(Operation operation, Load load, Beside beside, Columns columns, StoreS store_s,
                                  StoreY store_y, Compute* mean, Compute* rstd, int64 rows, Compute eps) {
  constexpr int kVectorSize = Shape::kVectorSize;
  constexpr int64 kStep = static_cast<int64>(Shape::kThreads) * kVectorSize;
  constexpr bool kRowScale = kRowScaled<StoreY>;
  using Exchange = RowExchange<Shape, 1, Norm::kRunningValues, Compute>;
  using LargestExchange = RowExchange<Shape, 1, 1, Compute>;
  __shared__ Exchange exchange;
  __shared__ LargestExchange largest_exchange;

  const int64 first_column = static_cast<int64>(threadIdx.x) * kVectorSize;
  // A warp that stores together goes on until its first lane is beyond the row.
  const int64 first_stored = StoreY::kTogether ? first_column / (32 * kVectorSize) * (32 * kVectorSize) : first_column;
  const auto valid_at = [](int64 column) {
    const int64 left = kCols - column;
    if (!StoreY::kTogether && kCols % kVectorSize == 0) return kVectorSize;
    return left >= kVectorSize ? kVectorSize : left > 0 ? static_cast<int>(left) : 0;
  };
  int iteration = 0;
  for (int64 row = blockIdx.x; row < rows; row += gridDim.x, ++iteration) {
    typename Norm::template Running<Compute> running;
#pragma unroll 4
    for (int64 column = first_column; column < kCols; column += kStep) {
      const int valid = valid_at(column);
      typename Load::Raw raw;
      Compute values[kVectorSize];
      load.fetch(raw, row, column, valid);
      load.unpack(load.keep(raw, valid), values);
      running.add(values, valid);
    }
    Compute published[Norm::kRunningValues], part[Norm::kValues];
    running.publish(published);
    exchange.publish(iteration, 0, published);
    running.template merge<Exchange, kCols>(part, exchange.collect(iteration));
    const auto statistics = Norm::template finish<kCols>(part, eps);

    if (threadIdx.x == 0) {
      if constexpr (Norm::kHasMean) {
        if (mean != nullptr) mean[row] = statistics.mean();
      }
      if (rstd != nullptr) rstd[row] = statistics.rstd;
    }
    const auto y_of = [&](int64 column, int valid, Compute(&values)[kVectorSize], bool stores_s) {
      typename Load::Raw raw;
      typename Beside::Packed beside_vector;
      typename Columns::Packed column_vector;
      Compute beside_values[kArrays<Beside>][kVectorSize], column_values[kArrays<Columns>][kVectorSize];
      load.fetch(raw, row, column, valid);
      beside.fetch(beside_vector, row, column, valid);
      columns.fetch(column_vector, row, column, valid);
      const auto s = load.keep(raw, valid);
      if (stores_s) store_s.store_packed(row, column, valid, s);
      load.unpack(s, values);
      beside.unpack(beside_vector, beside_values);
      columns.unpack(column_vector, column_values);
      statistics.normalise(values);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) values[i] = operation.epilogue(values[i], beside_values, column_values, i);
    };
    Compute multiplier = 1;
    if constexpr (kRowScale) {
      Compute largest = 0;
#pragma unroll 4
      for (int64 column = first_column; column < kCols; column += kStep) {
        const int valid = valid_at(column);
        Compute values[kVectorSize];
        y_of(column, valid, values, false);
        largest = larger(largest, largest_of(values, valid));
      }
      const Compute published[1] = {group_largest<32>(largest)};
      largest_exchange.publish(iteration, 0, published);
      largest = largest_of_slots<LargestExchange>(largest_exchange.collect(iteration));
      multiplier = store_y.multiplier(row, 0, largest, threadIdx.x == 0);
    }
#pragma unroll 4
    for (int64 start = first_stored; start < kCols; start += kStep) {
      const int64 column = start + (first_column - first_stored);
      const int valid = valid_at(column);
      Compute values[kVectorSize];
      y_of(column, valid, values, true);
      if constexpr (StoreY::kScaled) {
        if constexpr (!kRowScale) {
          constexpr int kLanes = StoreY::kBlock / kVectorSize;
          const Compute largest = group_largest<kLanes>(largest_of(values, valid));
          const int64 block = column / StoreY::kBlock;
          multiplier = store_y.multiplier(row, block, largest, threadIdx.x % kLanes == 0 && valid > 0);
        }
        store_y.store(row, column, valid, values, multiplier);
      } else {
        store_y.store(row, column, valid, values);
      }
    }
  }
}

}  // namespace cunorm
