// dweight and dbias on their way out of a kernel that adds them up.
#pragma once
#include "pack.cuh"

namespace cunorm {

// Which gradients somebody asked for.
template <bool kDx_, bool kDweight_, bool kDbias_>
struct Gradients {
  static constexpr bool kDx = kDx_;
  static constexpr bool kDweight = kDweight_;
  static constexpr bool kDbias = kDbias_;
};

// A partial row: the first kSumColumns of every pack, then the next ones of every pack, so that neighbouring threads
// write neighbouring 16 bytes.
template <int kPack>
struct PartialRow {
  static constexpr int kPiece = kPack < kSumColumns ? kPack : kSumColumns;
  int64 cols;

  DEVICE constexpr int64 packs() const { return (cols + kPack - 1) / kPack; }
  // From one partial row to the next: whole pieces.
  DEVICE constexpr int64 stride() const { return (packs() * kPack + kSumColumns - 1) / kSumColumns * kSumColumns; }
  DEVICE constexpr int64 position(int64 column) const {
    return column % kPack / kPiece * (packs() * kPiece) + column / kPack * kPiece + column % kPiece;
  }
  DEVICE constexpr int64 column(int64 position) const {
    if (kPack <= kSumColumns) return position;
    const int64 piece = position / (packs() * kPiece);
    return (position / kPiece - piece * packs()) * kPack + piece * kPiece + position % kPiece;
  }
};

// Where the sums of a group (a CTA or a cluster) go: to a partial row,
template <class Compute, int kPack, int64 kCols>
struct StorePartial {
  using Row = PartialRow<kPack>;
  Compute* data;

  static constexpr int kPlaces = static_cast<int>(Row{kCols}.packs() * kPack);
  DEVICE StorePartial of_group(int64 group) const { return {data + group * Row{kCols}.stride()}; }
  DEVICE void pack(int64 column, const Compute (&sums)[kPack], int valid) const {
    if (valid == 0) return;
#pragma unroll
    for (int piece = 0; piece < kPack / Row::kPiece; ++piece) {
      Compute values[Row::kPiece];
#pragma unroll
      for (int i = 0; i < Row::kPiece; ++i) values[i] = sums[piece * Row::kPiece + i];
      store_pack<true, Cache::kKept>(data + Row{kCols}.position(column + piece * Row::kPiece),
                                     pack_values<Compute>(values), Row::kPiece);
    }
  }
  // Places are in the order of memory.
  DEVICE static int column(int place) { return static_cast<int>(Row{kCols}.column(place)); }
  DEVICE void value(int place, Compute sum) const { data[place] = sum; }
};

// or to dweight or dbias itself, where there is one group.
template <class T, int kPack, int64 kCols, bool kAligned>
struct StoreGradient {
  static constexpr int kPlaces = kCols;
  T* data;

  DEVICE StoreGradient of_group(int64) const { return *this; }
  template <class Compute>
  DEVICE void pack(int64 column, const Compute (&sums)[kPack], int valid) const {
    store_pack<kAligned, Cache::kKept>(data + column, pack_values<T>(sums), valid);
  }
  DEVICE static int column(int place) { return place; }
  template <class Compute>
  DEVICE void value(int place, Compute sum) const {
    store_value(data + place, sum);
  }
};

}  // namespace cunorm
