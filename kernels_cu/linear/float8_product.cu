// y = product * row_scale * column_scale + bias: for a product of 8-bit rows that was made without their scales.
#pragma once
#include "rows/load.cuh"
#include "rows/store.cuh"

namespace cunorm {

template <int kThreads, class Load, class Columns, class Store>
DEVICE void scale_product(Load product, const float* row_scale, Columns columns, Store y, int64 rows, int64 cols) {
  constexpr int kVectorSize = Load::kVectorSize;
  const int64 column = (static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x) * kVectorSize;
  const int64 left = cols - column;
  const int valid = left < 0 ? 0 : left < kVectorSize ? static_cast<int>(left) : kVectorSize;
  typename Columns::Packed column_vector;
  float of_columns[Columns::kCount][kVectorSize];  // scale, and bias if there is one
  columns.fetch(column_vector, 0, column, valid);
  columns.unpack(column_vector, of_columns);
  wait_for_kernel_before();
  for (int64 row = blockIdx.y; row < rows; row += gridDim.y) {
    typename Load::Packed vector;
    float values[kVectorSize];
    product.fetch(vector, row, column, valid);
    product.unpack(vector, values);
    const float scale = row_scale[row];
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      values[i] = values[i] * scale * of_columns[0][i];
      if constexpr (Columns::kCount > 1) values[i] += of_columns[Columns::kCount - 1][i];
    }
    y.store(row, column, valid, values);
  }
}

}  // namespace cunorm
