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

// Every CTA takes kRows rows at a time. Columns are the vectors of the first epilogue, SecondColumns those of the
// second: asked for with x (kColumnsStay), or each with its pack. rstd and second_rstd may be null: then nobody will
// read them.
template <class Norm, class Shape, int kRows, bool kColumnsStay, class S, class Compute, class Operation, class Load,
          class Beside, class Columns, class SecondColumns, class StoreS, class StoreY>
DEVICE void norm_forward_twice(Operation operation, Load load, Beside beside, Columns columns,
                               SecondColumns second_columns, StoreS store_s, StoreY store_y, Compute* rstd,
                               Compute* second_rstd, int64 rows, Compute eps) {
  constexpr int kPack = Shape::kPack;
  constexpr int kPacks = Shape::kPacks;
  using Exchange = RowExchange<Shape, kRows, Norm::kValues, Compute>;
  __shared__ Exchange exchange;
  static_assert(!Norm::kHasMean, "a second mean would want a pivot");
  static_assert(kRows == 1 || Shape::kSlots == 1, "several rows share a CTA only if a warp holds each");

  const int64 row_step = static_cast<int64>(gridDim.x) * kRows;
  int64 row = static_cast<int64>(blockIdx.x) * kRows + threadIdx.x / Shape::kThreads;
  RegisterRows<Shape, Load> rows_x(load, 0, rows, 0);
  RegisterRows<Shape, Beside> rows_beside(beside, 0, rows, 0);

  typename Columns::Packed column_packs[kPacks];
  typename SecondColumns::Packed second_packs[kPacks];
  const auto fetch_columns = [&](int p) {
    columns.fetch(column_packs[p], row, Shape::column(0, p), Shape::valid(0, p));
  };
  const auto fetch_second = [&](int p) {
    second_columns.fetch(second_packs[p], row, Shape::column(0, p), Shape::valid(0, p));
  };

  // Of the row that values_of(p, values) has, a pack at a time; `turn` counts such calls.
  const auto statistics_of = [&](int turn, auto values_of) {
    Compute sums[Norm::kLaneSums] = {}, part[Norm::kValues];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Compute values[kPack];
      values_of(p, values);
      Norm::add(sums, values, Shape::valid(0, p), Compute{0});
    }
    Norm::template gathered<Shape::kLanes>(part, sums, Compute{0});
    if constexpr (Shape::kSlots > 1) {
      exchange.publish(turn, 0, part);
      Norm::template merge<Exchange, Shape::kCols>(part, exchange.collect(turn),
                                                   [](int slot) { return Shape::slot_columns(slot); });
    }
    return Norm::template finish<Shape::kCols>(part, eps);
  };

  for (int turn = 0; first_of_warp<Shape>(row) < rows; row += row_step, turn += 2) {
    rows_x.take(row);
    rows_beside.take(row);
    if constexpr (kColumnsStay) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        fetch_columns(p);
        fetch_second(p);
      }
    }
    const auto first = statistics_of(turn, [&](int p, Compute(&values)[kPack]) {
      typename Load::Packed x;
      rows_x.read(x, p);
      load.unpack(x, values);
      rows_x.stay_packed(p);
    });

    const bool active = Shape::kThreads >= 32 || row < rows;
    Pack<S, kPack> s[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int valid = active ? Shape::valid(0, p) : 0;
      typename Load::Packed x;
      typename Beside::Packed beside_pack;
      Compute values[kPack], beside_values[kArrays<Beside>][kPack], column_values[kArrays<Columns>][kPack];
      if constexpr (!kColumnsStay) fetch_columns(p);
      rows_x.read(x, p);
      load.unpack(x, values);
      first.normalise(values);
      rows_beside.read(beside_pack, p);
      beside.unpack(beside_pack, beside_values);
      columns.unpack(column_packs[p], column_values);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        values[i] = i < valid ? operation.epilogue(values[i], beside_values, column_values, i) : 0;
      }
      s[p] = pack_values<S>(values);
      store_s.store_packed(row, Shape::column(0, p), valid, s[p]);
    }

    const auto second = statistics_of(turn + 1, [&](int p, Compute(&values)[kPack]) {
      stay_packed(s[p]);
      unpack(s[p], values);
    });
    if (active && threadIdx.x % Shape::kThreads == 0) {
      if (rstd != nullptr) rstd[row] = first.rstd;
      if (second_rstd != nullptr) second_rstd[row] = second.rstd;
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int valid = active ? Shape::valid(0, p) : 0;
      Compute values[kPack], column_values[kArrays<SecondColumns>][kPack];
      if constexpr (!kColumnsStay) fetch_second(p);
      stay_packed(s[p]);
      unpack(s[p], values);
      second.normalise(values);
      second_columns.unpack(second_packs[p], column_values);
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] = operation.second(values[i], column_values, i);
      store_y.store(row, Shape::column(0, p), valid, values);
    }
  }
}

}  // namespace cunorm
