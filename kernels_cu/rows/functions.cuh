// Functions that expressions call (CUDA_FUNCTIONS in expression/texts.py); numbers.cuh has those of the mathematics
// library.
#pragma once
#include "rows/platform.cuh"

namespace cunorm {

// Where the exponential overflows the result is 0, as it should be.
template <class Compute>
DEVICE Compute sigmoid(Compute value) {
  return reciprocal(Compute(1) + quick_exponential(-value));
}

// NaN if either is, as in NumPy and torch.
template <class Compute>
DEVICE Compute minimum(Compute first, Compute second) {
  return first < second || first != first ? first : second;
}
template <class Compute>
DEVICE Compute maximum(Compute first, Compute second) {
  return first > second || first != first ? first : second;
}

}  // namespace cunorm
