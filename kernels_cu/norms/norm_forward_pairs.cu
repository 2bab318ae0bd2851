// LayerNorm forward of many rows that several warps hold, two at a time: what norm_forward.cu computes, to the bit. A
// thread reads and unpacks weight and bias once for both rows, and what a row costs whatever its length one
// half of a warp works out for one of them, the other half for the other.
#pragma once
#include "rows/float8.cuh"
#include "rows/load.cuh"
#include "rows/row.cuh"
#include "norms/statistics.cuh"
#include "rows/store.cuh"

namespace cunorm {

// A CTA for every two rows. Of an odd number of rows the last is computed as both of its pair, and written twice.
template <class Norm, class Shape, class Compute, class Operation, class Load, class Beside, class Columns,
          class StoreS, class StoreY>
DEVICE void norm_forward_pairs(Operation operation, Load load, Beside, Columns columns, StoreS, StoreY store_y,
                               Compute* mean, Compute* rstd, int64 rows, Compute eps) {
  constexpr int kVectorSize = Shape::kVectorSize;
  constexpr int kVectors = Shape::kVectors;
  constexpr int kSlots = Shape::kSlots;
  using Exchange = RowExchange<Shape, 1, Norm::kValues, Compute>;
  static_assert(Norm::kHasMean, "RMSNorm gained nothing by it");
  static_assert(Beside::kCount == 0 && !kStores<StoreS>, "x is read and y written, nothing else");
  static_assert(Shape::kCluster == 1 && kSlots > 1 && kSlots <= 16, "half a warp reads what all warps published");
  __shared__ typename Exchange::Slots slots[2];

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, half = lane / 16;
  const int64 first = static_cast<int64>(blockIdx.x) * 2;
  const int64 pair[2] = {first, first + 1 < rows ? first + 1 : first};

  typename Load::template Loading<Shape> loading[2];
  typename Load::Packed vectors[2][kVectors];
#pragma unroll
  for (int r = 0; r < 2; ++r) load.template start<Shape>(loading[r], pair[r], 0, true);
#pragma unroll
  for (int r = 0; r < 2; ++r) load.template receive<Shape>(vectors[r], loading[r], pair[r], 0, true);
  const auto read = [&](int r, int p, Compute(&values)[kVectorSize]) {
    load.unpack(vectors[r][p], values);
    load.keep_packed(vectors[r][p]);
  };

  Compute sums[2 * Norm::kLaneSums] = {}, pivots[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    Compute values[kVectorSize], of_row[Norm::kLaneSums] = {};
    read(r, 0, values);
    pivots[r] = Norm::template pivot<Shape>(warp, values);
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      read(r, p, values);
      Norm::add(of_row, values, Shape::valid(0, p), pivots[r]);
    }
#pragma unroll
    for (int k = 0; k < Norm::kLaneSums; ++k) sums[r * Norm::kLaneSums + k] = of_row[k];
  }
  // Number k of a row is now in the k-th part of its half of the lanes.
  constexpr int kPartLanes = 16 / Norm::kLaneSums;
  const Compute of_part = group_sum<32>(sums);
  if (lane % kPartLanes == 0) {
    slots[half](Norm::kValues - Norm::kLaneSums + lane / kPartLanes % Norm::kLaneSums, warp) = of_part;
  }
  if (lane % 16 == 0) slots[half](0, warp) = half ? pivots[1] : pivots[0];
  __syncthreads();
  Compute part[Norm::kValues];
  Norm::template merge<Exchange, Shape::kCols>(part, slots[half], [](int other) { return Shape::slot_columns(other); });
  const auto of_half = Norm::template finish<Shape::kCols>(part, eps);
  if (warp == 0 && lane % 16 == 0) {
    if (mean != nullptr) mean[half ? pair[1] : pair[0]] = of_half.mean();
    if (rstd != nullptr) rstd[half ? pair[1] : pair[0]] = of_half.rstd;
  }
  const typename Norm::template Row<Compute> statistics[2] = {of_half.of_lane(0), of_half.of_lane(16)};

  const auto for_each_vector = [&](auto use) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      typename Columns::Packed column_vector;
      Compute beside_values[1][kVectorSize], column_values[kArrays<Columns>][kVectorSize];
      columns.fetch(column_vector, first, Shape::column(0, p), Shape::valid(0, p));
      columns.unpack(column_vector, column_values);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        Compute values[kVectorSize];
        read(r, p, values);
        statistics[r].normalise(values);
#pragma unroll
        for (int i = 0; i < kVectorSize; ++i)
          values[i] = operation.epilogue(values[i], beside_values, column_values, i);
        use(r, p, values);
      }
    }
  };
  if constexpr (!StoreY::kScaled) {
    for_each_vector([&](int r, int p, const Compute(&values)[kVectorSize]) {
      store_y.store(pair[r], Shape::column(0, p), Shape::valid(0, p), values);
    });
  } else {
    constexpr bool kRow = StoreY::kBlock == 0;
    // Each number of `largest` is found by its own part of the lanes that share it.
    constexpr int kLanes = kRow ? 32 : StoreY::kBlock / kVectorSize;
    constexpr int kOfRow = kRow ? 1 : kVectors;
    constexpr int kParts = power_of_two_from(2 * kOfRow);
    constexpr int kOwnLanes = kLanes / kParts;
    static_assert(kRow || Shape::kStep % StoreY::kBlock == 0);
    Compute y[2][kVectors][kVectorSize], largest[kParts] = {};
    for_each_vector([&](int r, int p, const Compute(&values)[kVectorSize]) {
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) y[r][p][i] = values[i];
      float& found = largest[r * kOfRow + (kRow ? 0 : p)];
      found = larger(found, largest_of(values, Shape::valid(0, p)));
    });
    const int own = lane % kLanes / kOwnLanes;  // the number that this lane has found
    const int r_own = own / kOfRow;
    Compute of_own;
    bool writes;
    int64 block = 0;
    if constexpr (kRow) {
      __shared__ float largest_slots[2][kSlots];
      const float of_rows[2] = {group_largest<32>(largest[0]), group_largest<32>(largest[1])};
      if (lane % 16 == 0) largest_slots[half][warp] = half ? of_rows[1] : of_rows[0];
      __syncthreads();
      const int slot = lane % Exchange::kGroup;
      of_own = group_largest<Exchange::kGroup>(slot < kSlots ? largest_slots[half][slot] : 0);
      writes = warp == 0 && lane % 16 == 0;
    } else {
      of_own = group_largest<kLanes>(largest);
      block = Shape::column(0, own % kOfRow) / StoreY::kBlock;
      writes = lane % kOwnLanes == 0 && own < 2 * kOfRow && block * StoreY::kBlock < Shape::kCols;
    }
    const float multiplier = store_y.multiplier(r_own ? pair[1] : pair[0], block, of_own, writes);
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int holder = lane / kLanes * kLanes + (r * kOfRow + (kRow ? 0 : p)) * kOwnLanes;
        store_y.store(pair[r], Shape::column(0, p), Shape::valid(0, p), y[r][p], shuffle(multiplier, holder));
      }
    }
  }
}

}  // namespace cunorm
