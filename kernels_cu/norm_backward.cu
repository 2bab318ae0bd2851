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
template <bool kRms, class Shape, int kRows, template <class> class Rows, class Needs, class Compute, class LoadX,
          class LoadDy, class Scale, class StoreDx, class StoreSums>
DEVICE void norm_backward(LoadX load_x, LoadDy load_dy, Scale scale, StoreDx store_dx, const Compute* mean,
                          const Compute* rstd, StoreSums dweight, StoreSums dbias, int64 rows) {
  constexpr int kPack = Shape::kPack;
  constexpr int kPacks = Shape::kPacks;
  using RowsX = Rows<LoadX>;
  using Exchange = RowExchange<Shape, kRows, kRms ? 1 : 2, Compute>;
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

  // The weight stays in registers from row to row where 16 of them hold it and no more than two packs need others, else
  // in shared memory.
  constexpr bool kWeightStays = kPacks <= 2 && kPacks * sizeof(typename Scale::Operands) <= 64;
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

  Compute row_mean, row_rstd;
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
      for (int i = 0; i < kPack; ++i) xhat[i] = (xhat[i] - row_mean) * row_rstd;
      use(p, xhat, grad, g);
    }
  };

  Compute next_mean = !kRms && row < rows ? mean[row] : 0;
  Compute next_rstd = row < rows ? rstd[row] : 0;
  for (int turn = 0; first_of_warp<Shape>(row) < rows; row += row_step, ++turn) {
    row_mean = next_mean;
    row_rstd = next_rstd;
    const int64 next = row + row_step;
    next_mean = !kRms && next < rows ? mean[next] : 0;
    next_rstd = next < rows ? rstd[next] : 0;
    const auto ask_next = [&] {
      rows_x.ask(row + RowsX::kAhead * row_step, RowsX::kAhead - 1);
      rows_dy.ask(row + RowsX::kAhead * row_step, RowsX::kAhead - 1);
      RowsX::sent();
    };
    RowsX::arrived();
    rows_x.take(row);
    rows_dy.take(row);
    if constexpr (RowsX::kAskEarly) ask_next();

    Compute c1 = 0;
    Compute c2 = 0;
    for_each_pack([&](int p, const Compute(&xhat)[kPack], const Compute(&grad)[kPack], const Compute(&g)[kPack]) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        if constexpr (Needs::kDweight) dweight_sums[p][i] = multiply_add(grad[i], xhat[i], dweight_sums[p][i]);
        if constexpr (Needs::kDbias) dbias_sums[p][i] += grad[i];
        c1 = multiply_add(g[i], xhat[i], c1);
        if constexpr (!kRms) c2 += g[i];
      }
    });
    if constexpr (Needs::kDx) {
      c1 = group_sum<Shape::kLanes>(c1);
      if constexpr (!kRms) c2 = group_sum<Shape::kLanes>(c2);
      if constexpr (kExchanges && kRms) exchange.publish(turn, rank, {c1});
      if constexpr (kExchanges && !kRms) exchange.publish(turn, rank, {c1, c2});
    }
    if constexpr (!RowsX::kAskEarly) ask_next();
    if constexpr (!Needs::kDx) continue;

    if constexpr (kExchanges) {
      const auto& slots = exchange.collect(turn);
      c1 = Exchange::sum([&](int slot) { return slots[0][slot]; });
      if constexpr (!kRms) c2 = Exchange::sum([&](int slot) { return slots[1][slot]; });
    }
    c1 /= Shape::kCols;
    c2 /= Shape::kCols;
    const auto store = [&](int p, const Compute(&xhat)[kPack], const Compute(&)[kPack], Compute(&g)[kPack]) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) g[i] = multiply_add(-xhat[i], c1, g[i]) * row_rstd;
      const bool active = Shape::kThreads >= 32 || row < rows;
      store_dx.store(row, Shape::column(rank, p), active ? Shape::valid(rank, p) : 0, g);
    };
    if constexpr (kRms) {
      for_each_pack(store);
    } else {
      for_each_pack(store, -c2);
    }
  }

  if constexpr (Needs::kDweight) store_sums<Shape, kRows>(dweight_sums, rank, dweight.of_group(group));
  if constexpr (Needs::kDbias) store_sums<Shape, kRows>(dbias_sums, rank, dbias.of_group(group));
}

}  // namespace cunorm
