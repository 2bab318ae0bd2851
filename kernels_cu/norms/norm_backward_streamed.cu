// dx for rows that no register file holds: one CTA a row, x and dy read twice. dweight and dbias of such rows come
// from weight_gradient.cu. Formulas as in norm_backward.cu.
#pragma once
#include "norms/gradients.cuh"
#include "rows/load.cuh"
#include "norms/statistics.cuh"
#include "rows/store.cuh"

namespace cunorm {

// Shape describes one step along the row: kThreads threads, one vector each.
template <class Norm, int64 kCols, class Shape, class Compute, class Operation, class Matrices, class Columns,
          class Results, class RowSums>
DEVICE void norm_backward_streamed(Operation operation, Matrices matrices, Columns columns, Results results,
                                   RowSums row_sums_to, const Compute* mean, const Compute* rstd, int64 rows) {
  constexpr int kVectorSize = Shape::kVectorSize;
  constexpr int64 kStep = static_cast<int64>(Shape::kThreads) * kVectorSize;
  using Exchange = RowExchange<Shape, 1, Norm::kGradientSums, Compute>;
  __shared__ Exchange exchange;
  using RowTotals = TotalsOfRow<Shape, 1, Results, RowSums, Compute>;
  __shared__ typename RowTotals::Exchange exchange_of_totals;

  using SavedRow = typename Norm::template SavedRow<Compute>;
  int iteration = 0;
  for (int64 row = blockIdx.x; row < rows; row += gridDim.x, ++iteration) {
    const SavedRow saved = Operation::kOfXhat ? SavedRow::of(mean, rstd, row) : SavedRow{};
    // Calls use(column, valid, xhat, matrices, columns) for every vector of this thread, and for none of its columns
    // where only the `before` columns of other lanes before them are in the row.
    const auto for_each_vector = [&](int64 before, auto use) {
#pragma unroll(Matrices::kVectorized ? 4 : 2)
      for (int64 start = static_cast<int64>(threadIdx.x) * kVectorSize - before; start < kCols; start += kStep) {
        const int64 column = start + before, left = kCols - column;
        const int valid = left >= kVectorSize ? kVectorSize : left > 0 ? static_cast<int>(left) : 0;
        typename Matrices::Packed matrix_vector;
        typename Columns::Packed column_vector;
        Compute matrix_values[kArrays<Matrices>][kVectorSize], column_values[kArrays<Columns>][kVectorSize],
            xhat[kVectorSize];
        matrices.fetch(matrix_vector, row, column, valid);
        columns.fetch(column_vector, row, column, valid);
        matrices.unpack(matrix_vector, matrix_values);
        columns.unpack(column_vector, column_values);
#pragma unroll
        for (int i = 0; i < kVectorSize; ++i) {
          const bool counts = Operation::kOfXhat && (!Operation::kMasks || i < valid);
          xhat[i] = counts ? saved.xhat(operation.source(matrix_values, column_values, i)) : 0;
        }
        use(column, valid, xhat, matrix_values, column_values);
      }
    };

    Compute means[Norm::kGradientSums] = {};
    if constexpr (Operation::kOfS) {
      CompensatedSum<Compute> sums[Norm::kGradientSums];
      for_each_vector(0, [&](int64, int valid, const auto& xhat, const auto& matrix_values, const auto& column_values) {
        Compute of_vector[Norm::kGradientSums], g[kVectorSize];
#pragma unroll
        for (int i = 0; i < kVectorSize; ++i) {
          const bool counts = !Operation::kMasks || i < valid;
          g[i] = counts ? operation.gradient(xhat[i], matrix_values, column_values, i) : 0;
        }
        Norm::gradient_of_vector(of_vector, g, xhat);
#pragma unroll
        for (int k = 0; k < Norm::kGradientSums; ++k) sums[k].add(of_vector[k]);
      });
#pragma unroll
      for (int k = 0; k < Norm::kGradientSums; ++k) means[k] = sums[k].total();
      exchange.publish_sums(iteration, 0, means);
      const auto& slots = exchange.collect(iteration);
#pragma unroll
      for (int k = 0; k < Norm::kGradientSums; ++k) {
        // Divided for the reason that statistics.cuh gives.
        means[k] = Exchange::sum([&](int slot) { return slots(k, slot); }) / static_cast<Compute>(kCols);
      }
    }

    const Projection<Compute> projection = saved.projection(means);
    // A warp that stores together goes on until its first lane is beyond the row.
    RowTotals totals;
    const int64 before = Results::kTogether ? threadIdx.x % 32 * kVectorSize : 0;
    for_each_vector(
        before, [&](int64 column, int valid, const auto& xhat, const auto& matrix_values, const auto& column_values) {
          Compute values[RowTotals::kArrays][kVectorSize], no_sums[1][1][kVectorSize];
#pragma unroll
          for (int i = 0; i < kVectorSize; ++i) {
            const Compute ds = gradient_of_s(operation, saved, projection, xhat[i], matrix_values, column_values, i);
            operation.late(xhat[i], ds, matrix_values, column_values, i, 0, no_sums, values);
          }
          results.store(row, column, valid, values);
          totals.add(values, valid);
        });
    totals.bring(row_sums_to, exchange_of_totals, iteration, 0, row, true);
    RowTotals::template collect<false>(row_sums_to, exchange_of_totals, iteration, 0, row);
  }
}

}  // namespace cunorm
