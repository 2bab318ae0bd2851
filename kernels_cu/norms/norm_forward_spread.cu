// LayerNorm and RMSNorm forward of few rows: what norm_forward.cu computes, to the bit, by more threads for the vectors
// of a row, or by as many without its iterations. A row alone then waits for fewer instructions.
#pragma once
#include "rows/float8.cuh"
#include "rows/load.cuh"
#include "rows/rows.cuh"
#include "norms/statistics.cuh"
#include "rows/store.cuh"

namespace cunorm {

// A CTA (or cluster) for every row. Its threads are those of Shape, each of them so many times that one holds
// kVectorsHeld of the kVectors vectors at most: the sums that a thread of norm_forward adds its vectors to are added up
// here through shared memory, in the same order.
template <class Norm, class Shape, int kVectorsHeld, class Compute, class Operation, class Load, class Beside,
          class Columns, class StoreS, class StoreY>
DEVICE void norm_forward_spread(Operation operation, Load load, Beside beside, Columns columns, StoreS store_s,
                                StoreY store_y, Compute* mean, Compute* rstd, Compute eps) {
  constexpr int kVectorSize = Shape::kVectorSize;
  constexpr int kVectors = Shape::kVectors;
  constexpr int kParts = (kVectors + kVectorsHeld - 1) / kVectorsHeld;
  static_assert(kVectorsHeld == (kVectors + kParts - 1) / kParts,
                "no thread of any part holds more vectors than it must");
  static_assert(kParts > 1 || Shape::kThreads % 32 == 0, "threads to spare come after several parts");
  using Exchange = RowExchange<Shape, 1, Norm::kValues, Compute>;
  __shared__ Exchange exchange;
  __shared__ Compute lane_sums[Norm::kLaneSums][kVectors][Shape::kThreads];

  const int rank = Shape::kCluster > 1 ? cluster_rank() : 0;
  const int64 row = blockIdx.x / Shape::kCluster;
  const int part_of_row = static_cast<int>(threadIdx.x) / Shape::kThreads;
  const int thread = static_cast<int>(threadIdx.x) % Shape::kThreads;
  const int slot = rank * Shape::kWarps + (Shape::kWarps > 1 ? thread / 32 : 0);
  // The last warp may have threads to spare, and the last thread vectors.
  const auto vector_of = [&](int i) { return part_of_row + i * kParts; };
  const auto there = [&](int i) {
    return (Shape::kThreads % 32 == 0 && kVectors % kParts == 0) || vector_of(i) < kVectors;
  };
  // Many vectors of a cluster are checked though the compiler knows that they lie in the row: LayerNorm of 64 x
  // 32768 5.8 us, unchecked 6.7.
  constexpr bool kChecked = Shape::kCluster > 1 && kVectorsHeld > 4;
  const auto valid_of = [&](int p) { return Shape::template valid<kChecked>(rank, p); };

  typename Load::Raw raw[kVectorsHeld], raw_first;
  typename Beside::Packed beside_vectors[kVectorsHeld];
  typename Columns::Packed column_vectors[kVectorsHeld];
#pragma unroll
  for (int i = 0; i < kVectorsHeld; ++i) {
    const int p = vector_of(i);
    load.fetch(raw[i], row, Shape::column(rank, p), valid_of(p));
  }
  // Every warp finds the pivot itself: to hand it on would take one more barrier.
  if constexpr (Norm::kHasMean && kParts > 1) load.fetch(raw_first, row, Shape::column(rank, 0), valid_of(0));
#pragma unroll
  for (int i = 0; i < kVectorsHeld; ++i) {
    const int p = vector_of(i);
    beside.fetch(beside_vectors[i], row, Shape::column(rank, p), valid_of(p));
    columns.fetch(column_vectors[i], row, Shape::column(rank, p), valid_of(p));
  }
  if constexpr (Shape::kSlots > 1) exchange.start();

  Compute values[kVectorSize], pivot = 0;
  typename Load::Packed s[kVectorsHeld];
#pragma unroll
  for (int i = 0; i < kVectorsHeld; ++i) s[i] = load.keep(raw[i], valid_of(vector_of(i)));
  if constexpr (Norm::kHasMean) {
    load.unpack(kParts > 1 ? load.keep(raw_first, valid_of(0)) : s[0], values);
    pivot = Norm::template pivot<Shape>(slot, values);
  }
  Compute sums[Norm::kLaneSums] = {}, part[Norm::kValues];
#pragma unroll
  for (int i = 0; i < kVectorsHeld; ++i) {
    load.unpack(s[i], values);
    if constexpr (kParts > 1) {
#pragma unroll
      for (Compute& sum : sums) sum = 0;
    }
    Norm::add(sums, values, valid_of(vector_of(i)), pivot);
    if constexpr (kParts > 1) {
#pragma unroll
      for (int k = 0; k < Norm::kLaneSums; ++k) {
        if (there(i)) lane_sums[k][vector_of(i)][thread] = sums[k];
      }
    }
  }
  if constexpr (kParts > 1) {
#pragma unroll
    for (Compute& sum : sums) sum = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < Norm::kLaneSums; ++k) {
#pragma unroll
      for (int p = 0; p < kVectors; ++p) sums[k] += lane_sums[k][p][thread];
    }
  }
  Norm::template gathered<Shape::kLanes>(part, sums, pivot);
  if constexpr (Shape::kSlots > 1) {
    if (part_of_row == 0) exchange.publish(0, rank, part);
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
#pragma unroll
  for (int i = 0; i < kVectorsHeld; ++i) {
    const int column = Shape::column(rank, vector_of(i)), valid = valid_of(vector_of(i));
    Compute beside_values[kArrays<Beside>][kVectorSize], column_values[kArrays<Columns>][kVectorSize];
    load.unpack(s[i], values);
    store_s.store_packed(row, column, valid, s[i]);
    statistics.normalise(values);
    beside.unpack(beside_vectors[i], beside_values);
    columns.unpack(column_vectors[i], column_values);
#pragma unroll
    for (int j = 0; j < kVectorSize; ++j) values[j] = operation.epilogue(values[j], beside_values, column_values, j);
    store_y.store(row, column, valid, values);
  }
}

}  // namespace cunorm
