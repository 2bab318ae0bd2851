// LayerNorm and RMSNorm forward of many rows that several warps hold, two at a time: what norm_forward.cu computes, to
// the bit. A thread reads and unpacks weight and bias once for both rows, and what a row costs whatever its length one
// half of a warp works out for one of them, the other half for the other.
#pragma once
#include "float8.cuh"
#include "load_store.cuh"
#include "rows.cuh"
#include "statistics.cuh"

namespace cunorm {

// Every CTA takes two neighbouring rows at a time; kOnce: there are no more. Of an odd number of rows the last is
// computed as both of its pair, and written twice. Rows and kColumnsStay as in norm_forward.cu.
template <class Norm, class Shape, template <class> class Rows, bool kColumnsStay, bool kOnce, class Compute,
          class Operation, class Load, class Beside, class Columns, class StoreS, class StoreY>
DEVICE void norm_forward_pairs(Operation operation, Load load, Beside, Columns columns, StoreS, StoreY store_y,
                               Compute* mean, Compute* rstd, int64 rows, Compute eps) {
  constexpr int kPack = Shape::kPack;
  constexpr int kPacks = Shape::kPacks;
  constexpr int kSlots = Shape::kSlots;
  using RowsS = Rows<Load>;
  using Exchange = RowExchange<Shape, 1, Norm::kValues, Compute>;
  static_assert(Beside::kCount == 0 && !kStores<StoreS>, "x is read and y written, nothing else");
  static_assert(Shape::kCluster == 1 && kSlots > 1 && kSlots <= 16, "half a warp reads what all warps published");
  // Two sets, used in turn: one is written again after all who read it have met at the barrier of the other.
  __shared__ typename Exchange::Slots slots[2][2];

  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = lane / 16;
  const int64 step = static_cast<int64>(gridDim.x) * 2;
  const auto second = [&](int64 row) { return row + (row + 1 < rows); };
  typename Columns::Packed column_packs[kPacks];
  int64 row = static_cast<int64>(blockIdx.x) * 2;
  const auto fetch_columns = [&](int p) {
    columns.fetch(column_packs[p], row, Shape::column(0, p), Shape::valid(0, p));
  };
  RowsS rows_s[2] = {RowsS(load, 0, rows, 0), RowsS(load, 0, rows, RowsS::kBytes)};
  const auto ask = [&](int64 first, int ahead) {
    rows_s[0].ask(first, ahead);
    rows_s[1].ask(second(first), ahead);
    RowsS::sent();
  };
#pragma unroll
  for (int ahead = 0; ahead < RowsS::kAhead; ++ahead) ask(row + ahead * step, ahead);
  if constexpr (kColumnsStay) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) fetch_columns(p);
  }

  for (int turn = 0; row < rows; row += step, ++turn) {
    auto& published = slots[turn % 2];
    const int64 pair[2] = {row, second(row)};
    const int64 pair_of_half = half ? pair[1] : pair[0];
    RowsS::arrived();
    typename Load::Packed packs[2][kPacks];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows_s[r].take(pair[r]);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) rows_s[r].read(packs[r][p], p);
    }
    if constexpr (RowsS::kAskEarly) ask(row + RowsS::kAhead * step, RowsS::kAhead - 1);
    const auto read = [&](int r, int p, Compute(&values)[kPack]) {
      load.unpack(packs[r][p], values);
      load.stay_packed(packs[r][p]);
    };

    Compute sums[2 * Norm::kLaneSums], pivots[2] = {};
    if constexpr (Norm::kHasMean) {
      Compute parts[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        Compute first_pack[kPack];
        read(r, 0, first_pack);
        parts[r] = Norm::template part_of_pivot<Shape>(warp, first_pack);
      }
      const Compute pivot_of_half = group_sum<32>(parts);
#pragma unroll
      for (int r = 0; r < 2; ++r) pivots[r] = shuffle(pivot_of_half, 16 * r);
      if (lane % 16 == 0) published[half](0, warp) = pivot_of_half;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Compute values[kPack], of_row[Norm::kLaneSums] = {};
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
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
      published[half](Norm::kValues - Norm::kLaneSums + lane / kPartLanes % Norm::kLaneSums, warp) = of_part;
    }
    __syncthreads();
    if constexpr (!RowsS::kAskEarly) ask(row + RowsS::kAhead * step, RowsS::kAhead - 1);
    Compute part[Norm::kValues];
    Norm::template merge<Exchange, Shape::kCols>(part, published[half],
                                                 [](int other) { return Shape::slot_columns(other); });
    const auto of_half = Norm::template finish<Shape::kCols>(part, eps);
    if (warp == 0 && lane % 16 == 0) {
      if constexpr (Norm::kHasMean) {
        if (mean != nullptr) mean[pair_of_half] = of_half.mean();
      }
      if (rstd != nullptr) rstd[pair_of_half] = of_half.rstd;
    }
    const typename Norm::template Row<Compute> statistics[2] = {of_half.of_lane(0), of_half.of_lane(16)};

    const auto for_each_pack = [&](auto use) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        Compute beside_values[1][kPack], column_values[kArrays<Columns>][kPack];
        if constexpr (!kColumnsStay) fetch_columns(p);
        columns.stay_packed(column_packs[p]);
        columns.unpack(column_packs[p], column_values);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          Compute values[kPack];
          read(r, p, values);
          statistics[r].normalise(values);
#pragma unroll
          for (int i = 0; i < kPack; ++i) values[i] = operation.epilogue(values[i], beside_values, column_values, i);
          use(r, p, values);
        }
      }
    };
    if constexpr (!StoreY::kScaled) {
      for_each_pack([&](int r, int p, const Compute(&values)[kPack]) {
        store_y.store(pair[r], Shape::column(0, p), Shape::valid(0, p), values);
      });
    } else {
      constexpr bool kRow = StoreY::kBlock == 0;
      // Each number of `largest` is found by its own part of the lanes that share it.
      constexpr int kLanes = kRow ? 32 : StoreY::kBlock / kPack;
      constexpr int kOfRow = kRow ? 1 : kPacks;
      constexpr int kParts = power_of_two_from(2 * kOfRow);
      constexpr int kOwnLanes = kLanes / kParts;
      static_assert(kRow || Shape::kStep % StoreY::kBlock == 0);
      Compute y[2][kPacks][kPack], largest[kParts] = {};
      for_each_pack([&](int r, int p, const Compute(&values)[kPack]) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) y[r][p][i] = values[i];
        float& found = largest[r * kOfRow + (kRow ? 0 : p)];
        found = larger(found, largest_of(values, Shape::valid(0, p)));
      });
      const unsigned own = lane % kLanes / kOwnLanes;  // the number that this lane has found
      Compute of_own;
      bool writes;
      int64 block = 0;
      if constexpr (kRow) {
        __shared__ float largest_slots[2][2][kSlots];
        const float of_rows[2] = {group_largest<32>(largest[0]), group_largest<32>(largest[1])};
        if (lane % 16 == 0) largest_slots[turn % 2][half][warp] = half ? of_rows[1] : of_rows[0];
        __syncthreads();
        const unsigned slot = lane % Exchange::kGroup;
        of_own = group_largest<Exchange::kGroup>(slot < kSlots ? largest_slots[turn % 2][half][slot] : 0);
        writes = warp == 0 && lane % 16 == 0;
      } else {
        of_own = group_largest<kLanes>(largest);
        block = Shape::column(0, own % kOfRow) / StoreY::kBlock;
        writes = lane % kOwnLanes == 0 && own < 2 * kOfRow && block * StoreY::kBlock < Shape::kCols;
      }
      const float multiplier = store_y.multiplier(own < kOfRow ? pair[0] : pair[1], block, of_own, writes);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const unsigned holder = lane / kLanes * kLanes + (r * kOfRow + (kRow ? 0 : p)) * kOwnLanes;
          store_y.store(pair[r], Shape::column(0, p), Shape::valid(0, p), y[r][p], shuffle(multiplier, holder));
        }
      }
    }
    if constexpr (kOnce) break;
  }
}

}  // namespace cunorm
