#pragma once
#include "platform.cuh"

namespace cunorm {

// Which gradients somebody asked for.
template <bool kDx_, bool kDweight_, bool kDbias_>
struct Gradients {
  static constexpr bool kDx = kDx_;
  static constexpr bool kDweight = kDweight_;
  static constexpr bool kDbias = kDbias_;
};

// Elements from one partial row of dweight or dbias to the next: whole packs of 4.
DEVICE constexpr int64 partial_stride(int64 cols) { return (cols + 3) / 4 * 4; }

}  // namespace cunorm
