// LayerNorm and RMSNorm backward, rows held in shared memory: x and dy are read once, dx written once.
//   xhat = (x - mean) * rstd,  g = dy * weight
//   LayerNorm   dx = rstd * (g - c2 - xhat * c1),  c1 = mean(g * xhat), c2 = mean(g)
//   RMSNorm     dx = rstd * (g - xhat * c1)        (mean = 0)
//   dweight = Σ_rows dy * xhat,  dbias = Σ_rows dy
// One persistent kernel: a CTA (or cluster) takes every gridDim-th row, has its next rows under way while it works on
// the present ones (rows.cuh), and keeps dweight and dbias of its columns in registers. Each writes one partial row at
// the end, and weight_gradient.cu adds them up in a fixed order; a single one writes dweight and dbias themselves.
#pragma once
#include "gradients.cuh"
#include "load_store.cuh"
#include "rows.cuh"
#include "statistics.cuh"

namespace cunorm {

// Adds up what the kRows row groups of a CTA hold for the same columns, and stores it.
template <class Shape, int kRows, class Compute, class StoreSums>
DEVICE void store_sums(Compute (&sums)[Shape::kPacks][Shape::kPack], int rank, StoreSums store) {
  constexpr int kPack = Shape::kPack;
  // Threads that hold a set of columns once: a row group, or a warp once its row groups are added up by shuffles.
  constexpr int kHolders = kRows * Shape::kThreads / (Shape::kThreads < 32 && kRows > 1 ? 32 : Shape::kThreads);
  if constexpr (Shape::kThreads < 32 && kRows > 1) {
#pragma unroll
    for (int p = 0; p < Shape::kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
#pragma unroll
        for (int mask = Shape::kThreads; mask < 32; mask *= 2) sums[p][i] += shuffle_xor(sums[p][i], mask);
      }
    }
  }
  if constexpr (kHolders == 1) {
#pragma unroll
    for (int p = 0; p < Shape::kPacks; ++p) {
      store.pack(Shape::column(rank, p), sums[p], Shape::valid(rank, p));
    }
  } else {
    Compute* const totals = reinterpret_cast<Compute*>(dynamic_shared());  // [kHolders][kCapacity]
    const int holder = threadIdx.x * kHolders / (kRows * Shape::kThreads);
    __syncthreads();
    if (Shape::kThreads >= 32 || threadIdx.x % 32 < Shape::kThreads) {
#pragma unroll
      for (int p = 0; p < Shape::kPacks; ++p) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) totals[holder * Shape::kCapacity + Shape::slice_column(p) + i] = sums[p][i];
      }
    }
    __syncthreads();
    // Several row groups share a CTA only where it has the whole row.
    for (int place = threadIdx.x; place < StoreSums::kPlaces; place += kRows * Shape::kThreads) {
      const int column = StoreSums::column(place);
      Compute total = totals[column];
#pragma unroll
      for (int other = 1; other < kHolders; ++other) total += totals[other * Shape::kCapacity + column];
      store.value(place, total);
    }
  }
}

// Rows: where x and dy wait (rows.cuh). StoreSums: where dweight and dbias go (gradients.cuh).
template <class Norm, class Shape, int kRows, template <class> class Rows, class Needs, class Compute, class LoadX,
          class LoadDy, class Scale, class StoreDx, class StoreSums>
DEVICE void norm_backward(LoadX load_x, LoadDy load_dy, Scale scale, StoreDx store_dx, const Compute* mean,
                          const Compute* rstd, StoreSums dweight, StoreSums dbias, int64 rows) {
  constexpr int kPack = Shape::kPack;
  constexpr int kPacks = Shape::kPacks;
  using RowsX = Rows<LoadX>;
  using Exchange = RowExchange<Shape, kRows, Norm::kGradientSums, Compute>;
  using RowsDy = Rows<LoadDy>;
  constexpr bool kExchanges = Needs::kDx && Shape::kSlots > 1;
  __shared__ Exchange exchanges[kRows];
  const int row_group = threadIdx.x / Shape::kThreads;
  Exchange& exchange = exchanges[row_group];

  const int rank = Shape::kCluster > 1 ? cluster_rank() : 0;
  const int group = blockIdx.x / Shape::kCluster;
  const int64 row_step = static_cast<int64>(gridDim.x / Shape::kCluster) * kRows;
  Compute dweight_sums[kPacks][kPack] = {};
  Compute dbias_sums[kPacks][kPack] = {};

  // The weight stays in registers from row to row where a few hold it, else in shared memory.
  constexpr bool kWeightStays = kPacks <= kWeightPacks && kPacks * sizeof(typename Scale::Operands) <= kWeightBytes;
  typename Scale::Operands weight[kWeightStays ? kPacks : 1];
  const int weight_offset = RowsX::kBytes + RowsDy::kBytes + row_group * (Shape::kCapacity * Scale::kColumnBytes);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if constexpr (kWeightStays) {
      scale.fetch(weight[p], Shape::column(rank, p), Shape::valid(rank, p));
    } else {
      scale.template copy<Shape::kCapacity>(dynamic_shared() + weight_offset, Shape::slice_column(p),
                                            Shape::column(rank, p), Shape::valid(rank, p));
    }
  }

  int64 row = static_cast<int64>(group) * kRows + row_group;
  RowsX rows_x(load_x, rank, rows, 0);
  RowsDy rows_dy(load_dy, rank, rows, RowsX::kBytes);
#pragma unroll
  for (int ahead = 0; ahead < RowsX::kAhead; ++ahead) {
    rows_x.ask(row + ahead * row_step, ahead);
    rows_dy.ask(row + ahead * row_step, ahead);
    RowsX::sent();
  }
  if constexpr (kExchanges) exchange.start();

  using SavedRow = typename Norm::template SavedRow<Compute>;
  const auto saved_of = [&](int64 of) { return of < rows ? SavedRow::of(mean, rstd, of) : SavedRow{}; };
  SavedRow saved;
  // Calls use(p, xhat, dy, g + term) for every pack of this thread.
  const auto for_each_pack = [&](auto use, auto... term) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      typename LoadX::Packed x;
      typename LoadDy::Packed dy;
      typename Scale::Operands late;
      Compute xhat[kPack], grad[kPack], g[kPack];
      rows_dy.read(dy, p);
      load_dy.unpack(dy, grad);
      if constexpr (!kWeightStays)
        scale.template read<Shape::kCapacity>(late, dynamic_shared() + weight_offset, Shape::slice_column(p));
      scale.apply(grad, kWeightStays ? weight[kWeightStays ? p : 0] : late, g, term...);
      rows_x.read(x, p);
      load_x.unpack(x, xhat);
#pragma unroll
      for (int i = 0; i < kPack; ++i) xhat[i] = saved.xhat(xhat[i]);
      use(p, xhat, grad, g);
    }
  };

  SavedRow next = saved_of(row);
  for (int turn = 0; first_of_warp<Shape>(row) < rows; row += row_step, ++turn) {
    saved = next;
    next = saved_of(row + row_step);
    const auto ask_next = [&] {
      rows_x.ask(row + RowsX::kAhead * row_step, RowsX::kAhead - 1);
      rows_dy.ask(row + RowsX::kAhead * row_step, RowsX::kAhead - 1);
      RowsX::sent();
    };
    RowsX::arrived();
    rows_x.take(row);
    rows_dy.take(row);
    if constexpr (RowsX::kAskEarly) ask_next();

    Compute means[Norm::kGradientSums] = {};
    for_each_pack([&](int p, const Compute(&xhat)[kPack], const Compute(&grad)[kPack], const Compute(&g)[kPack]) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        if constexpr (Needs::kDweight) dweight_sums[p][i] = multiply_add(grad[i], xhat[i], dweight_sums[p][i]);
        if constexpr (Needs::kDbias) dbias_sums[p][i] += grad[i];
        if constexpr (Needs::kDx) Norm::add_gradient(means, g[i], xhat[i]);
      }
    });
    if constexpr (Needs::kDx) {
#pragma unroll
      for (Compute& sum : means) sum = group_sum<Shape::kLanes>(sum);
      if constexpr (kExchanges) exchange.publish(turn, rank, means);
    }
    if constexpr (!RowsX::kAskEarly) ask_next();
    if constexpr (!Needs::kDx) continue;

    if constexpr (kExchanges) {
      const auto& slots = exchange.collect(turn);
#pragma unroll
      for (int k = 0; k < Norm::kGradientSums; ++k) means[k] = Exchange::sum([&](int slot) { return slots[k][slot]; });
    }
#pragma unroll
    for (Compute& mean_of : means) mean_of *= one_part_in<Compute, Shape::kCols>();
    const auto store = [&](int p, const Compute(&xhat)[kPack], const Compute(&)[kPack], Compute(&g)[kPack]) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) g[i] = saved.dx(g[i], xhat[i], means);
      const bool active = Shape::kThreads >= 32 || row < rows;
      store_dx.store(row, Shape::column(rank, p), active ? Shape::valid(rank, p) : 0, g);
    };
    if constexpr (Norm::kCentresGradient) {
      for_each_pack(store, -means[1]);
    } else {
      for_each_pack(store);
    }
  }

  // A row group that had no row has waited for nothing, and its weight may still be under way.
  if constexpr (!kWeightStays) copies_wait<0>();
  if constexpr (Needs::kDweight) store_sums<Shape, kRows>(dweight_sums, rank, dweight.of_group(group));
  if constexpr (Needs::kDbias) store_sums<Shape, kRows>(dbias_sums, rank, dbias.of_group(group));
}

}  // namespace cunorm
