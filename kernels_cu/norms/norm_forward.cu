// LayerNorm and RMSNorm forward, rows held in registers or shared memory: x is read once, y written once.
//   LayerNorm   y = (x - mean(x)) * rstd * weight + bias,  rstd = 1 / sqrt(var(x) + eps)
//   RMSNorm     y = x * rstd * weight,                     rstd = 1 / sqrt(mean(x²) + eps)
// These are operations, and there are others: s = prologue(x, ...), y = epilogue(xhat, ...) for xhat = (s - mean) *
// rstd. The tiers (part of a warp, warp, CTA, cluster) are the same code for different RowShapes.
#pragma once
#include "rows/float8.cuh"
#include "rows/load.cuh"
#include "rows/rows.cuh"
#include "norms/statistics.cuh"
#include "rows/store.cuh"

namespace cunorm {

// Every CTA takes kRows rows at a time, which wait in Rows (rows.cuh); with kOneIteration there are no more. Load reads
// s (load.cuh), Beside the matrices and Columns the operands with a value for each column that the epilogue takes
// besides xhat: these stay in registers from row to row (kColumnsInRegisters) or are read again for every row.
// kUnpacked: a thread keeps the values of its row, and reads its vectors from Rows once and not three times. StoreY may
// want the largest of what shares a scale (float8.cuh). mean and rstd may be null: then nobody will read them.
template <class Norm, class Shape, int kRows, template <class> class Rows, bool kColumnsInRegisters, bool kOneIteration,
          bool kUnpacked, class Compute, class Operation, class Load, class Beside, class Columns, class StoreS,
          class StoreY>
DEVICE void norm_forward(Operation operation, Load load, Beside beside, Columns columns, StoreS store_s, StoreY store_y,
                         Compute* mean, Compute* rstd, int64 rows, Compute eps) {
  constexpr int kVectorSize = Shape::kVectorSize;
  constexpr int kVectors = Shape::kVectors;
  using RowsS = Rows<Load>;
  using Exchange = RowExchange<Shape, kRows, Norm::kValues, Compute>;
  __shared__ Exchange exchange;
  // Of max|y|, which all threads of a row need where it has one scale.
  using LargestExchange = RowExchange<Shape, kRows, 1, Compute>;
  __shared__ LargestExchange largest_exchange;
  constexpr bool kRowScale = kRowScaled<StoreY>;
  static_assert(kRows == 1 || Shape::kSlots == 1, "several rows share a CTA only if a warp holds each");
  static_assert(!kUnpacked || !kStores<StoreS>, "s is stored from its vectors");
  static_assert(RowsS::kPrefetchEarly || Shape::kSlots > 1, "rows are prefetched late where warps wait for each other");

  const int rank = Shape::kCluster > 1 ? cluster_rank() : 0;
  const int slot = rank * Shape::kWarps + (Shape::kWarps > 1 ? threadIdx.x / 32 : 0);
  const int64 row_step = static_cast<int64>(gridDim.x / Shape::kCluster) * kRows;
  typename Columns::Packed column_vectors[kVectors];

  int64 row = static_cast<int64>(blockIdx.x / Shape::kCluster) * kRows + threadIdx.x / Shape::kThreads;
  // Where a cluster's threads hold many vectors, weight and bias arrive late: so many vectors of them are loaded ahead.
  constexpr int kColumnsAhead = Shape::kCluster > 1 && kVectors > 4 && !kColumnsInRegisters && !StoreY::kScaled ? 2 : 0;
  const auto fetch_columns = [&](int p) {
    columns.fetch(column_vectors[p], row, Shape::column(rank, p), Shape::valid(rank, p));
  };
  RowsS rows_s(load, rank, rows, 0);
  Rows<Beside> rows_beside(beside, rank, rows, RowsS::kBytes);
#pragma unroll
  for (int ahead = 0; ahead < RowsS::kAhead; ++ahead) {
    rows_s.prefetch(row + ahead * row_step, ahead);
    rows_beside.prefetch(row + ahead * row_step, ahead);
    RowsS::sent();
  }
  if constexpr (kColumnsInRegisters) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) fetch_columns(p);
  }
  if constexpr (Shape::kSlots > 1) exchange.start();
  if constexpr (Shape::kSlots > 1 && kRowScale) largest_exchange.start();

  Compute unpacked[kVectors][kVectorSize];
  const auto read = [&](int p, Compute(&values)[kVectorSize]) {
    if constexpr (kUnpacked) {
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) values[i] = unpacked[p][i];
    } else {
      typename Load::Packed s;
      rows_s.read(s, p);
      load.unpack(s, values);
    }
  };
  const auto for_each_vector = [&](auto use) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      Compute values[kVectorSize];
      read(p, values);
      rows_s.keep_packed(p);
      const int valid = Shape::valid(rank, p);
      // A cluster's rows are in shared memory: a branch delays no load, and without it ptxas spills 4 to 8 bytes.
      if (Shape::kCluster == 1 || valid > 0) use(values, valid);
    }
  };

  for (int iteration = 0; first_of_warp<Shape>(row) < rows; row += row_step, ++iteration) {
    const auto prefetch_next = [&] {
      rows_s.prefetch(row + RowsS::kAhead * row_step, RowsS::kAhead - 1);
      rows_beside.prefetch(row + RowsS::kAhead * row_step, RowsS::kAhead - 1);
      RowsS::sent();
    };
    RowsS::arrived();
    rows_s.take(row);
    rows_beside.take(row);

    if constexpr (kUnpacked) {
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        typename Load::Packed s;
        rows_s.read(s, p);
        load.unpack(s, unpacked[p]);
      }
    }
    if constexpr (RowsS::kPrefetchEarly) prefetch_next();
    Compute sums[Norm::kLaneSums] = {}, part[Norm::kValues], pivot = 0;
    if constexpr (Norm::kHasMean) {
      Compute first[kVectorSize];
      read(0, first);
      rows_s.keep_packed(0);
      pivot = Norm::template pivot<Shape>(slot, first);
    }
    const auto add = [&](const Compute(&values)[kVectorSize], int valid) { Norm::add(sums, values, valid, pivot); };
    for_each_vector(add);
    // Of a few columns the pivot may be a standard deviation away from the mean, and y 4.3 ulp off (70000 x 7,
    // float32).
    if constexpr (Norm::kHasMean && Shape::kLanes == 1) {
      pivot = multiply_add(sums[0], one_part_in<Compute, Shape::kCols>(), pivot);
      for (Compute& sum : sums) sum = 0;
      for_each_vector(add);
    }
    Norm::template gathered<Shape::kLanes>(part, sums, pivot);
    if constexpr (Shape::kSlots > 1) {
      exchange.publish(iteration, rank, part);
      if constexpr (!RowsS::kPrefetchEarly) prefetch_next();
      Norm::template merge<Exchange, Shape::kCols>(part, exchange.collect(iteration),
                                                   [](int other) { return Shape::slot_columns(other); });
    }
    // By a product five vectors of a CTA spilled 4 to 130 bytes, rows that fill all buffers 24 to 120, and six vectors
    // that stay beside float32 weight and bias in clusters 16 to 20. Seven that are read for each use, 53248 columns,
    // took 90 us by a call, 73 by a product.
    constexpr bool kFull = Shape::kCapacity == Shape::kCols;
    constexpr bool kLarge =
        kVectors > 4 && (Shape::kCluster == 1 || (RowsS::kInRegisters && Columns::kColumnBytes > 4));
    constexpr bool kByCall = !kColumnsInRegisters || kLarge || kFull;
    const auto statistics = Norm::template finish<Shape::kCols, kByCall>(part, eps);

    const bool active = Shape::kThreads >= 32 || row < rows;
    if (active && rank == 0 && threadIdx.x % Shape::kThreads == 0) {
      if constexpr (Norm::kHasMean) {
        if (mean != nullptr) mean[row] = statistics.mean();
      }
      if (rstd != nullptr) rstd[row] = statistics.rstd;
    }
    const auto y_of = [&](int p, int valid, Compute(&values)[kVectorSize]) {
      if constexpr (kColumnsAhead > 0) {
        if (p == 0) {
#pragma unroll
          for (int ahead = 0; ahead < kColumnsAhead; ++ahead) fetch_columns(ahead);
        }
        if (p + kColumnsAhead < kVectors) fetch_columns(p + kColumnsAhead);
      } else if constexpr (!kColumnsInRegisters) {
        fetch_columns(p);
      }
      typename Load::Packed s;
      typename Beside::Packed beside_vector;
      Compute beside_values[kArrays<Beside>][kVectorSize], column_values[kArrays<Columns>][kVectorSize];
      if constexpr (kUnpacked) {
        read(p, values);
      } else {
        rows_s.read(s, p);
        store_s.store_packed(row, Shape::column(rank, p), valid, s);
        load.unpack(s, values);
      }
      statistics.normalise(values);
      rows_beside.read(beside_vector, p);
      beside.unpack(beside_vector, beside_values);
      columns.keep_packed(column_vectors[p]);
      columns.unpack(column_vectors[p], column_values);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) values[i] = operation.epilogue(values[i], beside_values, column_values, i);
    };
    if constexpr (StoreY::kScaled) {
      store_scaled<Shape>(store_y, row, rank, active, y_of, [&](Compute largest) {
        if constexpr (Shape::kSlots == 1) return largest;
        const Compute published[1] = {largest};
        largest_exchange.publish(iteration, rank, published);
        return largest_of_slots<LargestExchange>(largest_exchange.collect(iteration));
      });
    } else {
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        const int valid = active ? Shape::valid(rank, p) : 0;
        Compute values[kVectorSize];
        y_of(p, valid, values);
        store_y.store(row, Shape::column(rank, p), valid, values);
      }
    }
    if constexpr (kOneIteration) break;
  }
}

}  // namespace cunorm
