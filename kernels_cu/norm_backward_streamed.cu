// dx for rows that no register file holds: one CTA a row, x and dy read twice. dweight and dbias of such rows come
// from weight_gradient.cu. Formulas as in norm_backward.cu.
#pragma once
#include "load_store.cuh"
#include "statistics.cuh"

namespace cunorm {

// Shape describes one step along the row: kThreads threads, one pack each.
template <class Norm, int64 kCols, class Shape, class Compute, class LoadX, class LoadDy, class Scale, class StoreDx>
DEVICE void norm_backward_streamed(LoadX load_x, LoadDy load_dy, Scale scale, StoreDx store_dx, const Compute* mean,
                                   const Compute* rstd, int64 rows) {
  constexpr int kPack = Shape::kPack;
  constexpr int64 kStep = static_cast<int64>(Shape::kThreads) * kPack;
  using Exchange = RowExchange<Shape, 1, Norm::kGradientSums, Compute>;
  __shared__ Exchange exchange;

  int turn = 0;
  for (int64 row = blockIdx.x; row < rows; row += gridDim.x, ++turn) {
    const auto saved = Norm::template SavedRow<Compute>::of(mean, rstd, row);
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
        for (int i = 0; i < kPack; ++i) xhat[i] = saved.xhat(xhat[i]);
        use(column, valid, xhat, g);
      }
    };

    CompensatedSum<Compute> sums[Norm::kGradientSums];
    for_each_pack([&](int64, int, const Compute(&xhat)[kPack], const Compute(&g)[kPack]) {
      Compute of_pack[Norm::kGradientSums];
      Norm::gradient_of_pack(of_pack, g, xhat);
#pragma unroll
      for (int k = 0; k < Norm::kGradientSums; ++k) sums[k].add(of_pack[k]);
    });
    Compute means[Norm::kGradientSums];
#pragma unroll
    for (int k = 0; k < Norm::kGradientSums; ++k) means[k] = group_sum<32>(sums[k].total());
    exchange.publish(turn, 0, means);
    const auto& slots = exchange.collect(turn);
#pragma unroll
    for (int k = 0; k < Norm::kGradientSums; ++k) {
      // Divided for the reason that statistics.cuh gives.
      means[k] = Exchange::sum([&](int slot) { return slots[k][slot]; }) / static_cast<Compute>(kCols);
    }

    const auto store = [&](int64 column, int valid, const Compute(&xhat)[kPack], Compute(&g)[kPack]) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) g[i] = saved.dx(g[i], xhat[i], means);
      store_dx.store(row, column, valid, g);
    };
    if constexpr (Norm::kCentresGradient) {
      for_each_pack(store, -means[1]);
    } else {
      for_each_pack(store);
    }
  }
}

}  // namespace cunorm
