#pragma once

namespace cunorm {

// Which gradients somebody asked for.
template <bool kDx_, bool kDweight_, bool kDbias_>
struct Gradients {
  static constexpr bool kDx = kDx_;
  static constexpr bool kDweight = kDweight_;
  static constexpr bool kDbias = kDbias_;
};

}  // namespace cunorm
