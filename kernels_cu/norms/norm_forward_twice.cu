// A norm of x, what its epilogue adds, and the norm of that sum, rows held in registers: what stands between the
// sublayers of Gemma.
//   s = residual + x * rstd * weight   rounded,   rstd = 1 / sqrt(mean(x²) + eps)
//   y = s * second_rstd * second_weight,          second_rstd = 1 / sqrt(mean(s²) + eps)
// x and residual are read once, s and y written once. Bits are those of norm_forward.cu, one operation after the other.
#pragma once
#include "rows/load.cuh"
#include "rows/rows.cuh"
#include "norms/statistics.cuh"
#include "rows/store.cuh"

namespace cunorm {

// Every CTA takes kRows rows at a time. Columns are the operands with a value for each column of the first epilogue,
// SecondColumns those of the second; they are loaded with x (kColumnsInRegisters) or where they are used. rstd and
// second_rstd may be null: then nobody will read them.
template <class Norm, class Shape, int kRows, bool kColumnsInRegisters, class S, class Compute, class Operation,
          class Load, class Beside, class Columns, class SecondColumns, class StoreS, class StoreY>
DEVICE void norm_forward_twice(Operation operation, Load load, Beside beside, Columns columns,
                               SecondColumns second_columns, StoreS store_s, StoreY store_y, Compute* rstd,
                               Compute* second_rstd, int64 rows, Compute eps) {
  constexpr int kVectorSize = Shape::kVectorSize;
  constexpr int kVectors = Shape::kVectors;
  using Exchange = RowExchange<Shape, kRows, Norm::kValues, Compute>;
  __shared__ Exchange exchange;
  static_assert(!Norm::kHasMean, "a second mean would want a pivot");
  static_assert(kRows == 1 || Shape::kSlots == 1, "several rows share a CTA only if a warp holds each");

  const int64 row_step = static_cast<int64>(gridDim.x) * kRows;
  int64 row = static_cast<int64>(blockIdx.x) * kRows + threadIdx.x / Shape::kThreads;
  RegisterRows<Shape, Load> rows_x(load, 0, rows, 0);
  RegisterRows<Shape, Beside> rows_beside(beside, 0, rows, 0);

  typename Columns::Packed column_vectors[kVectors];
  typename SecondColumns::Packed second_vectors[kVectors];
  const auto fetch_columns = [&](int p) {
    columns.fetch(column_vectors[p], row, Shape::column(0, p), Shape::valid(0, p));
  };
  const auto fetch_second = [&](int p) {
    second_columns.fetch(second_vectors[p], row, Shape::column(0, p), Shape::valid(0, p));
  };

  // Of the row that values_of(p, values) has, a vector at a time; `iteration` counts such calls.
  const auto statistics_of = [&](int iteration, auto values_of) {
    Compute sums[Norm::kLaneSums] = {}, part[Norm::kValues];
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      Compute values[kVectorSize];
      values_of(p, values);
      Norm::add(sums, values, Shape::valid(0, p), Compute{0});
    }
    Norm::template gathered<Shape::kLanes>(part, sums, Compute{0});
    if constexpr (Shape::kSlots > 1) {
      exchange.publish(iteration, 0, part);
      Norm::template merge<Exchange, Shape::kCols>(part, exchange.collect(iteration),
                                                   [](int slot) { return Shape::slot_columns(slot); });
    }
    return Norm::template finish<Shape::kCols>(part, eps);
  };

  for (int iteration = 0; first_of_warp<Shape>(row) < rows; row += row_step, iteration += 2) {
    rows_x.take(row);
    rows_beside.take(row);
    if constexpr (kColumnsInRegisters) {
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        fetch_columns(p);
        fetch_second(p);
      }
    }
    const auto first = statistics_of(iteration, [&](int p, Compute(&values)[kVectorSize]) {
      typename Load::Packed x;
      rows_x.read(x, p);
      load.unpack(x, values);
      rows_x.keep_packed(p);
    });

    const bool active = Shape::kThreads >= 32 || row < rows;
    Vector<S, kVectorSize> s[kVectors];
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      const int valid = active ? Shape::valid(0, p) : 0;
      typename Load::Packed x;
      typename Beside::Packed beside_vector;
      Compute values[kVectorSize], beside_values[kArrays<Beside>][kVectorSize],
          column_values[kArrays<Columns>][kVectorSize];
      if constexpr (!kColumnsInRegisters) fetch_columns(p);
      rows_x.read(x, p);
      load.unpack(x, values);
      first.normalise(values);
      rows_beside.read(beside_vector, p);
      beside.unpack(beside_vector, beside_values);
      columns.unpack(column_vectors[p], column_values);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        values[i] = i < valid ? operation.epilogue(values[i], beside_values, column_values, i) : 0;
      }
      s[p] = pack_values<S>(values);
      store_s.store_packed(row, Shape::column(0, p), valid, s[p]);
    }

    const auto second = statistics_of(iteration + 1, [&](int p, Compute(&values)[kVectorSize]) {
      keep_packed(s[p]);
      unpack(s[p], values);
    });
    if (active && threadIdx.x % Shape::kThreads == 0) {
      if (rstd != nullptr) rstd[row] = first.rstd;
      if (second_rstd != nullptr) second_rstd[row] = second.rstd;
    }
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      const int valid = active ? Shape::valid(0, p) : 0;
      Compute values[kVectorSize], column_values[kArrays<SecondColumns>][kVectorSize];
      if constexpr (!kColumnsInRegisters) fetch_second(p);
      keep_packed(s[p]);
      unpack(s[p], values);
      second.normalise(values);
      second_columns.unpack(second_vectors[p], column_values);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) values[i] = operation.second(values[i], column_values, i);
      store_y.store(row, Shape::column(0, p), valid, values);
    }
  }
}

}  // namespace cunorm
