// How the sums of a group of rows lie in the workspace, from the kernel that adds the rows up to the one that adds up
// the groups.
#pragma once
#include "rows/platform.cuh"

namespace cunorm {

// A partial row: the first kSumColumns of every pack, then the next ones of every pack, so that neighbouring threads
// write neighbouring 16 bytes.
template <int kPack>
struct PartialRow {
  static constexpr int kPiece = kPack < kSumColumns ? kPack : kSumColumns;
  int64 cols;

  DEVICE constexpr int64 packs() const { return (cols + kPack - 1) / kPack; }
  // What is read of it: whole pieces.
  DEVICE constexpr int64 places() const { return (packs() * kPack + kSumColumns - 1) / kSumColumns * kSumColumns; }
  // From one partial row to the next: whole lines of L2.
  DEVICE constexpr int64 stride() const { return (places() + kLineColumns - 1) / kLineColumns * kLineColumns; }
  DEVICE constexpr int64 position(int64 column) const {
    return column % kPack / kPiece * (packs() * kPiece) + column / kPack * kPiece + column % kPiece;
  }
  DEVICE constexpr int64 column(int64 position) const {
    if (kPack <= kSumColumns) return position;
    const int64 piece = position / (packs() * kPiece);
    return (position / kPiece - piece * packs()) * kPack + piece * kPiece + position % kPiece;
  }
};

}  // namespace cunorm
