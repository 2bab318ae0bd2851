// dx for rows that no register file holds: one CTA a row, x and dy read twice. dweight and dbias of such rows come
// from weight_gradient.cu. Formulas as in norm_backward.cu.
#pragma once
#include "load_store.cuh"
#include "moments.cuh"

namespace cunorm {

// Shape describes one step along the row: kThreads threads, one pack each.
template <bool kRms, int64 kCols, class Shape, class Compute, class LoadX, class LoadDy, class Scale, class StoreDx>
DEVICE void norm_backward_streamed(LoadX load_x, LoadDy load_dy, Scale scale, StoreDx store_dx, const Compute* mean,
                                   const Compute* rstd, int64 rows) {
  constexpr int kPack = Shape::kPack;
  constexpr int64 kStep = static_cast<int64>(Shape::kThreads) * kPack;
  using Exchange = RowExchange<Shape, 1, kRms ? 1 : 2, Compute>;
  __shared__ Exchange exchange;

  int turn = 0;
  for (int64 row = blockIdx.x; row < rows; row += gridDim.x, ++turn) {
    const Compute row_mean = kRms ? 0 : mean[row];
    const Compute row_rstd = rstd[row];
    // Calls use(column, valid, xhat, g + term) for every pack of this thread.
    const auto for_each_pack = [&](auto use, auto... term) {
#pragma unroll 4
      for (int64 column = static_cast<int64>(threadIdx.x) * kPack; column < kCols; column += kStep) {
        const int valid = kCols - column < kPack ? static_cast<int>(kCols - column) : kPack;
        typename LoadX::Packed x;
        typename LoadDy::Packed dy;
        typename Scale::Operands weight;
        Compute xhat[kPack], grad[kPack], g[kPack];
        load_x.fetch(x, row, column, valid);
        load_dy.fetch(dy, row, column, valid);
        scale.fetch(weight, column, valid);
        load_x.unpack(x, xhat);
        load_dy.unpack(dy, grad);
        scale.apply(grad, weight, g, term...);
#pragma unroll
        for (int i = 0; i < kPack; ++i) xhat[i] = (xhat[i] - row_mean) * row_rstd;
        use(column, valid, xhat, g);
      }
    };

    CompensatedSum<Compute> sum_c1, sum_c2;
    for_each_pack([&](int64, int, const Compute(&xhat)[kPack], const Compute(&g)[kPack]) {
      sum_c1.add(dot(g, xhat));
      if constexpr (!kRms) {
        Compute pack_sum = 0;
#pragma unroll
        for (int i = 0; i < kPack; ++i) pack_sum += g[i];
        sum_c2.add(pack_sum);
      }
    });
    Compute c1 = group_sum<32>(sum_c1.total());
    Compute c2 = group_sum<32>(sum_c2.total());
    if constexpr (kRms) {
      exchange.publish(turn, 0, {c1});
      const auto& slots = exchange.collect(turn);
      c1 = Exchange::sum([&](int slot) { return slots[0][slot]; }) / kCols;
    } else {
      exchange.publish(turn, 0, {c1, c2});
      const auto& slots = exchange.collect(turn);
      c1 = Exchange::sum([&](int slot) { return slots[0][slot]; }) / kCols;
      c2 = Exchange::sum([&](int slot) { return slots[1][slot]; }) / kCols;
    }

    const auto store = [&](int64 column, int valid, const Compute(&xhat)[kPack], Compute(&g)[kPack]) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) g[i] = multiply_add(-xhat[i], c1, g[i]) * row_rstd;
      store_dx.store(row, column, valid, g);
    };
    if constexpr (kRms) {
      for_each_pack(store);
    } else {
      for_each_pack(store, -c2);
    }
  }
}

}  // namespace cunorm
