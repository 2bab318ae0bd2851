// The derivative of norm_forward_twice.cu, rows held in shared memory: dy, ds, s and x are read once, dresidual and dx
// written once.
//   t = ds + second_rstd * (g - ŝ * mean(g * ŝ))   rounded, dresidual,   ŝ = s * second_rstd, g = dy * second_weight
//   dx = rstd * (h - xhat * mean(h * xhat)),                           xhat = x * rstd,     h = t * weight
//   dsecond_weight = Σ_rows dy * ŝ,  dweight = Σ_rows t * xhat
// Bits of what is written by rows are those of norm_backward.cu, one operation after the other.
#pragma once
#include "norms/norm_backward.cu"

namespace cunorm {

// A vector of either half, first: what it adds to the sums over the row, and to those over rows. Functions, since NVRTC
// 12.9 and 13.0 crash where these are lambdas.
template <class Norm, class Of, class SavedRow, class Sums, class Compute, int kMatrices, int kColumns, int kVectorSize>
DEVICE void sum_up(const Of& of, const SavedRow& saved, Compute (&means)[Norm::kGradientSums], int p,
                   const Compute (&matrices)[kMatrices][kVectorSize], const Compute (&columns)[kColumns][kVectorSize],
                   Sums& sums) {
  Compute nothing[1][kVectorSize];
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) {
    const Compute xhat = saved.xhat(of.source(matrices, columns, i));
    of.early(xhat, matrices, columns, i, p, sums, nothing);
    Norm::add_gradient(means, of.gradient(xhat, matrices, columns, i), xhat);
  }
}
// And then, with the means of the row: the gradient of what this half normalises.
template <class Of, class SavedRow, class Sums, class Compute, int kMatrices, int kColumns, int kVectorSize>
DEVICE void differentiate(const Of& of, const SavedRow& saved, const Projection<Compute>& projection, int p,
                          const Compute (&matrices)[kMatrices][kVectorSize],
                          const Compute (&columns)[kColumns][kVectorSize], Sums& sums,
                          Compute (&values)[1][kVectorSize]) {
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) {
    const Compute xhat = saved.xhat(of.source(matrices, columns, i));
    const Compute through_norm = gradient_of_s(of, saved, projection, xhat, matrices, columns, i);
    of.late(xhat, through_norm, matrices, columns, i, p, sums, values);
  }
}

// OfS: the operation of which s is the row, of the matrices dy, ds and s. OfX: that of which x is, of t and x. t waits
// in the registers of a thread, rounded to T, from the sums of the one to those of the other.
template <class Norm, class Shape, int kRows, template <class> class Rows, class T, class Compute, class OfS, class OfX,
          class MatricesOfS, class MatricesOfX, class ColumnsOfS, class ColumnsOfX, class ResultsOfS, class ResultsOfX,
          class SumsOfS, class SumsOfX>
DEVICE void norm_backward_twice(OfS of_s, OfX of_x, MatricesOfS matrices_of_s, MatricesOfX matrices_of_x,
                                ColumnsOfS columns_of_s, ColumnsOfX columns_of_x, ResultsOfS results_of_s,
                                ResultsOfX results_of_x, SumsOfS sums_of_s_to, SumsOfX sums_of_x_to,
                                const Compute* second_rstd, const Compute* rstd, int64 rows) {
  constexpr int kVectorSize = Shape::kVectorSize;
  constexpr int kVectors = Shape::kVectors;
  using RowsOfS = Rows<MatricesOfS>;
  using RowsOfX = Rows<MatricesOfX>;
  using Exchange = RowExchange<Shape, kRows, Norm::kGradientSums, Compute>;
  static_assert(!Norm::kHasMean, "means are not read");
  __shared__ Exchange exchanges[kRows];
  const int row_group = row_group_of_thread<Shape, kRows, MatricesOfS::kVectorized>();
  Exchange& exchange = exchanges[row_group];

  const int rank = Shape::kCluster > 1 ? cluster_rank() : 0;
  const int group = blockIdx.x / Shape::kCluster;
  const int64 row_step = static_cast<int64>(gridDim.x / Shape::kCluster) * kRows;
  Compute sums_of_s[kArrays<SumsOfS>][kVectors][kVectorSize] = {},
          sums_of_x[kArrays<SumsOfX>][kVectors][kVectorSize] = {};

  constexpr bool kColumnsInRegisters = kColumnsFit<Shape, ColumnsOfS::kColumnBytes + ColumnsOfX::kColumnBytes>;
  typename ColumnsOfS::Packed vectors_of_s[kColumnsInRegisters ? kVectors : 1];
  typename ColumnsOfX::Packed vectors_of_x[kColumnsInRegisters ? kVectors : 1];
  char* const buffers_of_s = dynamic_shared() + RowsOfS::kBytes + RowsOfX::kBytes;
  char* const buffers_of_x = buffers_of_s + kRows * ColumnsOfS::buffer_bytes(Shape::kCapacity);
  hold_columns<Shape, kRows, kColumnsInRegisters>(columns_of_s, vectors_of_s, buffers_of_s, rank, row_group);
  hold_columns<Shape, kRows, kColumnsInRegisters>(columns_of_x, vectors_of_x, buffers_of_x, rank, row_group);

  int64 row = static_cast<int64>(group) * kRows + row_group;
  RowsOfS rows_of_s(matrices_of_s, rank, rows, 0);
  RowsOfX rows_of_x(matrices_of_x, rank, rows, RowsOfS::kBytes);
  const auto prefetch = [&](int64 of, int ahead) {
    rows_of_s.prefetch(of, ahead);
    rows_of_x.prefetch(of, ahead);
    RowsOfS::sent();
  };
#pragma unroll
  for (int ahead = 0; ahead < RowsOfS::kAhead; ++ahead) prefetch(row + ahead * row_step, ahead);
  if constexpr (Shape::kSlots > 1) exchange.start();

  using SavedRow = typename Norm::template SavedRow<Compute>;
  const auto saved_of = [&](const Compute* of, int64 at) {
    return at < rows ? SavedRow::of(static_cast<const Compute*>(nullptr), of, at) : SavedRow{};
  };
  // The means over the row of what each thread has added up; `iteration` counts them.
  const auto exchanged = [&](int iteration, Compute(&means)[Norm::kGradientSums], auto meanwhile) {
    if constexpr (Shape::kSlots > 1) {
      exchange.publish_sums(iteration, rank, means);
    } else {
#pragma unroll
      for (Compute& sum : means) sum = group_sum<Shape::kLanes>(sum);
    }
    meanwhile();
    if constexpr (Shape::kSlots > 1) {
      const auto& slots = exchange.collect(iteration);
#pragma unroll
      for (int k = 0; k < Norm::kGradientSums; ++k) means[k] = Exchange::sum([&](int slot) { return slots(k, slot); });
    }
#pragma unroll
    for (Compute& mean_of : means) mean_of *= one_part_in<Compute, Shape::kCols>();
  };

  SavedRow next_of_s = saved_of(second_rstd, row), next_of_x = saved_of(rstd, row);
  for (int iteration = 0; first_of_warp<Shape>(row) < rows; row += row_step, iteration += 2) {
    const SavedRow saved_of_s = next_of_s, saved_of_x = next_of_x;
    next_of_s = saved_of(second_rstd, row + row_step);
    next_of_x = saved_of(rstd, row + row_step);
    const auto prefetch_next = [&] { prefetch(row + RowsOfS::kAhead * row_step, RowsOfS::kAhead - 1); };
    RowsOfS::arrived();
    rows_of_s.take(row);
    rows_of_x.take(row);
    if constexpr (RowsOfS::kPrefetchEarly) prefetch_next();
    const bool active = Shape::kThreads >= 32 || row < rows;
    const auto valid_of = [&](int p) { return active ? Shape::valid(rank, p) : 0; };
    const auto read_of_s = [&](int p, Compute(&matrices)[kArrays<MatricesOfS>][kVectorSize],
                               Compute(&columns)[kArrays<ColumnsOfS>][kVectorSize]) {
      typename MatricesOfS::Packed vector;
      rows_of_s.read(vector, p);
      matrices_of_s.unpack(vector, matrices);
      read_columns<Shape, kRows, kColumnsInRegisters>(columns_of_s, vectors_of_s, buffers_of_s, row_group, p, columns);
    };

    Compute means[Norm::kGradientSums] = {};
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      Compute matrices[kArrays<MatricesOfS>][kVectorSize], columns[kArrays<ColumnsOfS>][kVectorSize];
      read_of_s(p, matrices, columns);
      sum_up<Norm>(of_s, saved_of_s, means, p, matrices, columns, sums_of_s);
    }
    exchanged(iteration, means, [&] {
      if constexpr (!RowsOfS::kPrefetchEarly) prefetch_next();
    });

    const Projection<Compute> projection_of_s = saved_of_s.projection(means);
    Vector<T, kVectorSize> t[kVectors];
    Compute means_of_x[Norm::kGradientSums] = {};
    // t and x
    const auto read_of_x = [&](int p, Compute(&matrices)[2][kVectorSize],
                               Compute(&columns)[kArrays<ColumnsOfX>][kVectorSize]) {
      typename MatricesOfX::Packed vector;
      rows_of_x.read(vector, p);
      matrices_of_x.unpack(vector, matrices + 1);
      unpack(t[p], matrices[0]);
      read_columns<Shape, kRows, kColumnsInRegisters>(columns_of_x, vectors_of_x, buffers_of_x, row_group, p, columns);
    };
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      Compute values[1][kVectorSize];
      {
        Compute matrices[kArrays<MatricesOfS>][kVectorSize], columns[kArrays<ColumnsOfS>][kVectorSize];
        read_of_s(p, matrices, columns);
        differentiate(of_s, saved_of_s, projection_of_s, p, matrices, columns, sums_of_s, values);
      }
      t[p] = pack_values<T>(values[0]);
      results_of_s.store_packed(row, Shape::column_beside_sums(rank, p), valid_of(p), t[p]);
      Compute matrices[2][kVectorSize], columns[kArrays<ColumnsOfX>][kVectorSize];
      read_of_x(p, matrices, columns);
      sum_up<Norm>(of_x, saved_of_x, means_of_x, p, matrices, columns, sums_of_x);
    }
    exchanged(iteration + 1, means_of_x, [] {});
    const Projection<Compute> projection_of_x = saved_of_x.projection(means_of_x);

#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      Compute matrices[2][kVectorSize], columns[kArrays<ColumnsOfX>][kVectorSize], values[1][kVectorSize];
      keep_packed(t[p]);
      read_of_x(p, matrices, columns);
      differentiate(of_x, saved_of_x, projection_of_x, p, matrices, columns, sums_of_x, values);
      results_of_x.store(row, Shape::column_beside_sums(rank, p), valid_of(p), values[0]);
    }
  }

  // A row group that had no row has waited for nothing, and its columns may still be under way.
  if constexpr (!kColumnsInRegisters) copies_wait<0>();
  next_kernel_may_begin();
  if constexpr (SumsOfS::kCount > 0) RowGroups<Shape, kRows, Compute>::store(sums_of_s, rank, group, sums_of_s_to);
  if constexpr (SumsOfX::kCount > 0) RowGroups<Shape, kRows, Compute>::store(sums_of_x, rank, group, sums_of_x_to);
}

}  // namespace cunorm
