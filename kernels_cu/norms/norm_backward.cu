// LayerNorm and RMSNorm backward, rows held in shared memory: x and dy are read once, dx written once.
//   xhat = (x - mean) * rstd,  g = dy * weight
//   LayerNorm   dx = rstd * (g - c2 - xhat * c1),  c1 = mean(g * xhat), c2 = mean(g)
//   RMSNorm     dx = rstd * (g - xhat * c1)        (mean = 0)
//   dweight = Σ_rows dy * xhat,  dbias = Σ_rows dy
// One persistent kernel: a CTA (or cluster) takes every gridDim-th row, has its next rows under way while it works on
// the present ones (rows.cuh), and keeps dweight and dbias of its columns in registers. Each writes one partial row at
// the end, and sum_partials.cu adds them up in a fixed order; a single one writes dweight and dbias themselves.
// Beside the columns of few rows (norm_backward_few.cu) it has one iteration, and its rows wait in registers.
#pragma once
#include "norms/gradients.cuh"
#include "rows/load.cuh"
#include "rows/rows.cuh"
#include "norms/statistics.cuh"
#include "rows/store.cuh"

namespace cunorm {

// What the kRows row groups of a CTA hold for the same columns, of all gradients that are sums over rows, on its way
// out: several groups add up through shared memory, where everything is put before anything is read.
template <class Shape, int kRows, class Compute>
struct RowGroups {
  static constexpr int kVectors = Shape::kVectors;
  static constexpr int kVectorSize = Shape::kVectorSize;
  static constexpr int kThreads = kRows * Shape::kThreads;
  // Threads that hold a set of columns once: a row group, or a warp once its row groups are added up by shuffles.
  static constexpr int kHolders = kThreads / (Shape::kThreads < 32 && kRows > 1 ? 32 : Shape::kThreads);
  static constexpr int kTotals = kHolders * Shape::kCapacity;  // of one gradient
  using Own = Compute[kVectors][kVectorSize];

  template <class... Stores>
  DEVICE static void store(Own (&sums)[kArrays<Sums<Stores...>>], int rank, int group, Sums<Stores...> stores) {
    if constexpr (kHolders > 1) __syncthreads();  // the rows have been read
    put<sizeof...(Stores)>(sums);
    if constexpr (kHolders > 1) __syncthreads();
    store_each(sums, 0, rank, group, stores);
  }

 private:
  DEVICE static Compute* totals() { return reinterpret_cast<Compute*>(dynamic_shared()); }

  // [gradient][holder][column]
  template <int kCount>
  DEVICE static void put(Own (&sums)[kCount]) {
    const int holder = threadIdx.x * kHolders / kThreads;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
#pragma unroll
        for (int i = 0; i < kVectorSize; ++i) {
          if constexpr (Shape::kThreads < 32 && kRows > 1) {
#pragma unroll
            for (int mask = Shape::kThreads; mask < 32; mask *= 2) sums[k][p][i] += shuffle_xor(sums[k][p][i], mask);
          }
          if (kHolders > 1 && (Shape::kThreads >= 32 || threadIdx.x % 32 < Shape::kThreads)) {
            totals()[k * kTotals + holder * Shape::kCapacity + Shape::local_column(p) + i] = sums[k][p][i];
          }
        }
      }
    }
  }

  DEVICE static void store_each(const Own*, int, int, int, Sums<>) {}
  template <class First, class... Others>
  DEVICE static void store_each(const Own* sums, int k, int rank, int group, Sums<First, Others...> stores) {
    const auto store = stores.first.of_group(group);
    if constexpr (kHolders == 1) {
#pragma unroll
      for (int p = 0; p < kVectors; ++p)
        store.vector(Shape::column_beside_sums(rank, p), sums[k][p], Shape::valid(rank, p));
    } else {
      // Several row groups share a CTA only where it has the whole row. A thread adds whole vectors up.
      static_assert(Shape::kCluster == 1);
      for (int column = threadIdx.x * kVectorSize; column < Shape::kCols; column += kThreads * kVectorSize) {
        Compute total[kVectorSize] = {};
#pragma unroll
        for (int holder = 0; holder < kHolders; ++holder) {
          const Compute* const of_vector = totals() + k * kTotals + holder * Shape::kCapacity + column;
#pragma unroll
          for (int i = 0; i < kVectorSize; ++i) total[i] += of_vector[i];
        }
        const int left = Shape::kCols - column;
        store.vector(column, total, Shape::kWholeVectors || left > kVectorSize ? kVectorSize : left);
      }
    }
    store_each(sums, k + 1, rank, group, stores.others);
  }
};

// Whether the operands that all rows of a CTA share, of kBytes a column, stay in registers from row to row.
template <class Shape, int kBytes>
constexpr bool kColumnsFit =
    Shape::kVectors <= kColumnVectors && Shape::kVectors * Shape::kVectorSize * kBytes <= kColumnBytes;

// Starts their loads, into registers or into shared memory, where each row group has a buffer.
template <class Shape, int kRows, bool kColumnsInRegisters, class Columns>
DEVICE void hold_columns(const Columns& columns,
                         typename Columns::Packed (&column_vectors)[kColumnsInRegisters ? Shape::kVectors : 1],
                         char* column_buffers, int rank, int row_group) {
#pragma unroll
  for (int p = 0; p < Shape::kVectors; ++p) {
    const int valid = Shape::valid(rank, p);
    if constexpr (kColumnsInRegisters) {
      columns.fetch(column_vectors[p], 0, Shape::column_beside_sums(rank, p), valid);
    } else if constexpr (!Columns::kVectorized) {
      typename Columns::Packed vector;
      columns.fetch(vector, 0, Shape::column_beside_sums(rank, p), valid);
      columns.template put<Shape::kCapacity, kRows>(column_buffers, row_group, Shape::vector_slot(p), vector);
    } else {
      if (valid <= 0) {
        columns.template clear<Shape::kCapacity, kRows>(column_buffers, row_group, Shape::vector_slot(p));
      }
      columns.template copy<Shape::kCapacity, kRows, Fetch::kCached>(column_buffers, row_group, Shape::vector_slot(p),
                                                                     0, Shape::column_beside_sums(rank, p), valid);
    }
  }
}

// values: [operand][column]
template <class Shape, int kRows, bool kColumnsInRegisters, class Columns, class Compute>
DEVICE void read_columns(const Columns& columns,
                         const typename Columns::Packed (&column_vectors)[kColumnsInRegisters ? Shape::kVectors : 1],
                         char* column_buffers, int row_group, int p, Compute (*values)[Shape::kVectorSize]) {
  if constexpr (kColumnsInRegisters) {
    columns.unpack(column_vectors[kColumnsInRegisters ? p : 0], values);
  } else {
    typename Columns::Packed column_vector;
    columns.template read<Shape::kCapacity, kRows>(column_vector, column_buffers, row_group, Shape::vector_slot(p));
    columns.unpack(column_vector, values);
  }
}

// Rows: where the rows of the matrices wait (rows.cuh). Columns: the operands with a value for each column that the
// derivative takes besides them. EarlyResults: gradients that are written row by row and need no sums over the row,
// Results: those that do; Sums: those that are sums over rows (gradients.cuh), all of them or those of a group
// (WhichRows, in rows.cuh); RowSums: those of numbers for rows (row_numbers.cuh). `cta`, of `ctas`: the CTA among those
// that have rows.
template <class Norm, class Shape, int kRows, template <class> class Rows, class Compute, class Operation,
          class Matrices, class Columns, class EarlyResults, class Results, class RowSums, class Sums, class WhichRows>
DEVICE void norm_backward(Operation operation, Matrices matrices, Columns columns, EarlyResults early_results,
                          Results results, RowSums row_sums_to, Sums sums_to, const Compute* mean, const Compute* rstd,
                          int64 rows, WhichRows which_rows, unsigned cta, unsigned ctas) {
  constexpr int kVectorSize = Shape::kVectorSize;
  constexpr int kVectors = Shape::kVectors;
  using RowsIn = Rows<Matrices>;
  using Exchange = RowExchange<Shape, kRows, Norm::kGradientSums, Compute>;
  constexpr bool kExchanges = Operation::kOfS && Shape::kSlots > 1;
  __shared__ Exchange exchanges[kRows];
  const int row_group = row_group_of_thread<Shape, kRows, Matrices::kVectorized>();
  Exchange& exchange = exchanges[row_group];
  using RowTotals = TotalsOfRow<Shape, kRows, Results, RowSums, Compute>;
  __shared__ typename RowTotals::Exchange exchanges_of_totals[kRows];
  auto& exchange_of_totals = exchanges_of_totals[row_group];

  const int rank = Shape::kCluster > 1 ? cluster_rank() : 0;
  const int group = cta / Shape::kCluster;
  const int64 groups = ctas / Shape::kCluster;
  const int64 row_step = groups * kRows;
  Compute sums[kArrays<Sums>][kVectors][kVectorSize] = {};

  // A thread that holds its row in registers has no other one.
  constexpr bool kOneIteration = RowsIn::kAhead == 0;
  // Columns stay in registers from row to row where a few hold them, else in shared memory.
  constexpr bool kColumnsInRegisters = kOneIteration || kColumnsFit<Shape, Columns::kColumnBytes>;
  typename Columns::Packed column_vectors[kColumnsInRegisters ? kVectors : 1];
  char* const column_buffers = dynamic_shared() + RowsIn::kBytes;  // one for each row group
  hold_columns<Shape, kRows, kColumnsInRegisters>(columns, column_vectors, column_buffers, rank, row_group);

  const int64 count = which_rows.count(rows);
  // The warps of a CTA have rows that lie far from each other: those left for the last iteration are then spread over
  // all CTAs. 3641 x 2304 18.5 us, with neighbouring rows in a CTA 19.0. But rows of a warp that asks early are
  // neighbours: RMSNorm of 512 columns, 64 M elements, 97.6 us, far from each other 100.0.
  constexpr bool kNeighbours = kOneIteration || kRows == 1 || (RowsIn::kPrefetchEarly && Shape::kThreads <= 32);
  constexpr int kOfWarp = 32 / Shape::kLanes;
  int64 index = static_cast<int64>(group) * kRows + row_group;
  if constexpr (!kNeighbours) {
    index = (row_group / kOfWarp * groups + group) * kOfWarp + row_group % kOfWarp;
  }
  RowsIn rows_in(matrices, rank, rows, 0);
#pragma unroll
  for (int ahead = 0; ahead < RowsIn::kAhead; ++ahead) {
    rows_in.prefetch(which_rows.of(index + ahead * row_step), ahead);
    RowsIn::sent();
  }
  if constexpr (kExchanges) exchange.start();
  if constexpr (RowTotals::kExchanges) exchange_of_totals.start();

  using SavedRow = typename Norm::template SavedRow<Compute>;
  const auto saved_of = [&](int64 of) {
    return Operation::kOfXhat && of < count ? SavedRow::of(mean, rstd, which_rows.of(of)) : SavedRow{};
  };
  SavedRow saved;
  // Calls use(p, valid, xhat, matrices, columns) for every vector of this thread.
  const auto for_each_vector = [&](auto use) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      typename Matrices::Packed matrix_vector;
      Compute matrix_values[kArrays<Matrices>][kVectorSize], column_values[kArrays<Columns>][kVectorSize],
          xhat[kVectorSize];
      rows_in.read(matrix_vector, p);
      matrices.unpack(matrix_vector, matrix_values);
      read_columns<Shape, kRows, kColumnsInRegisters>(columns, column_vectors, column_buffers, row_group, p,
                                                      column_values);
      const bool active = Shape::kThreads >= 32 || index < count;
      const int valid = active ? Shape::valid(rank, p) : 0;
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        xhat[i] = Operation::kOfXhat ? saved.xhat(operation.source(matrix_values, column_values, i)) : 0;
      }
      use(p, valid, xhat, matrix_values, column_values);
    }
  };

  SavedRow next = saved_of(index);
  int iterations = 0;
  for (int iteration = 0; first_of_warp<Shape>(index) < count && !(kOneIteration && iteration > 0);
       index += row_step, ++iteration) {
    saved = next;
    // Of clusters' rows at odd addresses, and of those in place, later: 4 to 52 bytes spilled.
    constexpr bool kSavedLate = Shape::kCluster > 1 && (!Matrices::kVectorized || RowsIn::kInPlace);
    if constexpr (!kSavedLate && !kOneIteration) next = saved_of(index + row_step);
    const auto prefetch_next = [&] {
      rows_in.prefetch(which_rows.of(index + RowsIn::kAhead * row_step), RowsIn::kAhead - 1);
      RowsIn::sent();
    };
    // After the last reading of a vector.
    const auto prefetch_in_place = [&](int p) {
      if constexpr (RowsIn::kInPlace) rows_in.prefetch_in_place(which_rows.of(index + row_step), p);
    };
    const auto sent_in_place = [&] {
      if constexpr (RowsIn::kInPlace) RowsIn::sent();
    };
    RowsIn::arrived();
    rows_in.take(which_rows.of(index));
    if constexpr (RowsIn::kPrefetchEarly) prefetch_next();

    Compute means[Norm::kGradientSums] = {}, kept[Operation::kKeepsG ? kVectors : 1][kVectorSize];
    for_each_vector([&](int p, int valid, const auto& xhat, const auto& matrix_values, const auto& column_values) {
      Compute values[kArrays<EarlyResults>][kVectorSize] = {};
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        if (Operation::kMasks && i >= valid) continue;
        operation.early(xhat[i], matrix_values, column_values, i, p, sums, values);
        if constexpr (Operation::kOfS) {
          const Compute g = operation.gradient(xhat[i], matrix_values, column_values, i);
          if constexpr (Operation::kKeepsG) kept[p][i] = g;
          Norm::add_gradient(means, g, xhat[i]);
        }
      }
      early_results.store(which_rows.of(index), Shape::column_beside_sums(rank, p), valid, values);
      if constexpr (!Operation::kLate) prefetch_in_place(p);
    });
    if constexpr (kExchanges) {
      exchange.publish_sums(iteration, rank, means);
    } else if constexpr (Operation::kOfS) {
#pragma unroll
      for (Compute& sum : means) sum = group_sum<Shape::kLanes>(sum);
    }
    if constexpr (!RowsIn::kPrefetchEarly && !RowsIn::kInPlace) prefetch_next();
    if constexpr (kSavedLate && !kOneIteration) next = saved_of(index + row_step);
    if constexpr (!Operation::kLate) {
      sent_in_place();
      continue;
    }

    if constexpr (kExchanges) {
      const auto& slots = exchange.collect(iteration);
#pragma unroll
      for (int k = 0; k < Norm::kGradientSums; ++k) means[k] = Exchange::sum([&](int slot) { return slots(k, slot); });
    }
    // The row before this one was brought long ago: nobody waits for a cluster's messages.
    if (RowTotals::kExchanges && iteration > 0) {
      RowTotals::template collect<kExchanges>(row_sums_to, exchange_of_totals, iteration - 1, rank,
                                              which_rows.of(index - row_step));
    }
#pragma unroll
    for (Compute& mean_of : means) mean_of *= one_part_in<Compute, Shape::kCols>();
    const Projection<Compute> projection = saved.projection(means);
    RowTotals totals;
#pragma unroll
    for (int p = 0; p < kVectors; ++p) rows_in.keep_packed(p);
    for_each_vector([&](int p, int valid, const auto& xhat, const auto& matrix_values, const auto& column_values) {
      Compute values[RowTotals::kArrays][kVectorSize];
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        if (Operation::kMasks && i >= valid) {
#pragma unroll
          for (auto& of_one : values) of_one[i] = 0;
          continue;
        }
        Compute ds;
        if constexpr (Operation::kKeepsG) {
          ds = (kept[p][i] - projection.at(operation.source(matrix_values, column_values, i))) * saved.rstd;
        } else {
          ds = gradient_of_s(operation, saved, projection, xhat[i], matrix_values, column_values, i);
        }
        operation.late(xhat[i], ds, matrix_values, column_values, i, p, sums, values);
      }
      results.store(which_rows.of(index), Shape::column_beside_sums(rank, p), valid, values);
      totals.add(values, valid);
      prefetch_in_place(p);
    });
    sent_in_place();
    totals.bring(row_sums_to, exchange_of_totals, iteration, rank, which_rows.of(index), index < count);
    if constexpr (RowTotals::kExchanges) iterations = iteration + 1;
  }

  if (RowTotals::kExchanges && iterations > 0) {
    RowTotals::template collect<false>(row_sums_to, exchange_of_totals, iterations - 1, rank,
                                       which_rows.of(index - row_step));
  }
  // A row group that had no row has waited for nothing, and its columns may still be under way.
  if constexpr (!kColumnsInRegisters) copies_wait<0>();
  next_kernel_may_begin();
  if constexpr (Sums::kCount > 0) RowGroups<Shape, kRows, Compute>::store(sums, rank, group, sums_to);
}

}  // namespace cunorm
