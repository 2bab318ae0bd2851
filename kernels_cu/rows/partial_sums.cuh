// How the sums of a group of rows lie in the workspace, from the kernel that adds the rows up to the one that adds up
// the groups.
#pragma once
#include "rows/platform.cuh"

namespace cunorm {

// The partial sums of a group lie like this: the first kSumColumns of every vector, then the next ones of every vector,
// so that neighbouring threads write neighbouring 16 bytes.
template <int kVectorSize>
struct PartialSums {
  static constexpr int kPiece = kVectorSize < kSumColumns ? kVectorSize : kSumColumns;
  int64 cols;

  DEVICE constexpr int64 vectors() const { return (cols + kVectorSize - 1) / kVectorSize; }
  // What is read of it: whole pieces.
  DEVICE constexpr int64 buffers() const {
    return (vectors() * kVectorSize + kSumColumns - 1) / kSumColumns * kSumColumns;
  }
  // From one partial row to the next: whole lines of L2.
  DEVICE constexpr int64 stride() const { return (buffers() + kLineColumns - 1) / kLineColumns * kLineColumns; }
  DEVICE constexpr int64 position(int64 column) const {
    return column % kVectorSize / kPiece * (vectors() * kPiece) + column / kVectorSize * kPiece + column % kPiece;
  }
  DEVICE constexpr int64 column(int64 position) const {
    if (kVectorSize <= kSumColumns) return position;
    const int64 piece = position / (vectors() * kPiece);
    return (position / kPiece - piece * vectors()) * kVectorSize + piece * kPiece + position % kPiece;
  }
};

}  // namespace cunorm
