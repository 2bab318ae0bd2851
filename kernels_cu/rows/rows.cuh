// Where the rows that a thread works on wait, from the moment they are asked for to their last use: in registers or in
// shared memory. Either way a thread sees the same packs in the same order, so results do not depend on it.
//
//   kAhead             how many rows to ask for before the first is taken
//   kAskEarly          whether to ask for the next as soon as a row is taken, or when its sums are known
//   kStay              whether a thread keeps its packs of a row in registers
//   kInPlace           whether the next row takes the place of the present one, pack by pack
//   ask(row, ahead)    asks for `row`, which comes `ahead` rows after the next that will be taken
//   ask_in_place(row, p)   the same of pack number p alone, of which this was the last reading
//   sent()             ends what is asked for in a turn, of all matrices
//   arrived()          waits for all matrices of the next turn
//   take(row)          the next row of those asked for is the one to read
//   read(pack, p)      this thread's pack number p of it
//   stay_packed(p)     between two uses: keep the pack, drop what was computed from it
#pragma once
#include "rows/load.cuh"
#include "rows/row.cuh"

namespace cunorm {

// Which rows a kernel that adds rows up walks over, by their places among them: all,
struct AllRows {
  DEVICE static int64 count(int64 rows) { return rows; }
  DEVICE static int64 of(int64 place) { return place; }
};

// or those of a group, which blockIdx.z says: `inner` neighbours, as many again after those of all other groups. A
// place beyond the last is a row beyond all.
struct RowsOfGroup {
  int64 group_rows;
  int64 inner;
  int64 groups;
  int64 reciprocal;  // of inner
  DEVICE int64 count(int64) const { return group_rows; }
  DEVICE int64 of(int64 place) const {
    return place + (quotient(place, reciprocal) * (groups - 1) + blockIdx.z) * inner;
  }
};

template <class Shape, class Load>
struct RegisterRows {
  static constexpr int kBytes = 0;
  static constexpr int kAhead = 0;
  static constexpr bool kAskEarly = true;
  static constexpr bool kStay = true;
  static constexpr bool kInPlace = false;
  Load load;
  int rank;
  int64 rows;
  typename Load::Packed now[Shape::kPacks];

  DEVICE RegisterRows(Load load, int rank, int64 rows, int) : load(load), rank(rank), rows(rows) {}

  DEVICE static void ask(int64, int) {}
  DEVICE static void sent() {}
  DEVICE static void arrived() {}
  DEVICE void take(int64 row) {
    typename Load::template Asked<Shape> asked;
    // A row past the end, beside rows of the same warp that are not, counts as zeros.
    const bool active = Shape::kThreads >= 32 || row < rows;
    load.template ask<Shape>(asked, row, rank, active);
    load.template receive<Shape>(now, asked, row, rank, active);
  }
  DEVICE void read(typename Load::Packed& pack, int p) const { pack = now[p]; }
  DEVICE void stay_packed(int p) { load.stay_packed(now[p]); }
};

// A ring of kStages places for each of the kRows rows of a CTA, filled by asynchronous copies: rows are under way
// whatever the threads do, and take no registers. A thread reads only what it copied itself, so nobody waits for
// anybody; of packs at odd addresses, what it and its neighbours copied (SharedPacks), which it shifts. With kRowsStay
// it reads them once, when they have come, and keeps them in registers. What it copied itself has then a free place, so
// that as many rows are under way by a place fewer: LayerNorm forward of 12288 columns, 8 M elements, 10.9 us by one
// place, 11.8 by two and a reading for each use. Rows at odd addresses would have to wait for their neighbours:
// backward of 1045 columns 125 us, by a place more 117.
//
// A single place of rows that are not kept is filled again in place: float32 of which two rows are more than shared
// memory has, LayerNorm backward of 262144 columns, H100, 288 us, streamed 635.
template <class Shape, int kRows, int kStages, bool kAskEarly_, bool kRowsStay, class Load>
struct SharedRows {
  // Rows of neighbouring threads lie side by side: with the places of a row side by side 32 columns fell from 0.86 to
  // 0.77 of the roof, by bank conflicts.
  static constexpr int kPlaces = kStages * kRows;
  static constexpr int kBytes = kPlaces * Load::place_bytes(Shape::kCapacity);
  static constexpr bool kInPlace = kStages == 1 && !kRowsStay;
  static constexpr int kAhead = kInPlace ? 1 : kStages - 1 + (kRowsStay && Load::kVectors);
  static constexpr bool kAskEarly = kAskEarly_;
  static constexpr bool kStay = kRowsStay;
  static_assert(!(kInPlace && kAskEarly), "a row in place is asked for when the one before it has been read");
  // Where rows lie close together, a CTA reads their neighbours too.
  static constexpr Fetch kFetch = Shape::kThreads < 32 ? Fetch::kNeighbours : Fetch::kAlone;
  Load load;
  int rank;
  int64 rows;
  int offset;  // in dynamic shared memory
  int row_group;
  int taken = kStages - 1;
  bool active = true;
  int64 row_taken = 0;
  typename Load::Packed kept[kRowsStay ? Shape::kPacks : 1];

  DEVICE SharedRows(Load load, int rank, int64 rows, int offset)
      : load(load),
        rank(rank),
        rows(rows),
        offset(offset),
        row_group(row_group_of_thread<Shape, kRows, Load::kVectors>()) {
    // Packs beyond the row: nothing will be copied there. With a check at every read backward of 131072 cols ran at
    // 0.80 of the roof, without at 0.95.
#pragma unroll
    for (int p = 0; p < Shape::kPacks; ++p) {
      if (Shape::valid(rank, p) > 0) continue;
      for (int stage = 0; stage < kStages; ++stage)
        load.template clear<Shape::kCapacity, kPlaces>(places(), place(stage), Shape::pack_slot(p));
    }
  }

  DEVICE void ask(int64 row, int ahead) {
    const int turn = taken + 1 + ahead;
    const int to = place(turn < kStages ? turn : turn - kStages);
    if (row < rows) {
      // By ones six packs at odd addresses spilled 4 bytes, by twos four of them 44.
#pragma unroll(Load::kVectors || kRowsStay ? Shape::kPacks : Shape::kPacks > 4 ? 2 : 1)
      for (int p = 0; p < Shape::kPacks; ++p) {
        load.template copy<Shape::kCapacity, kPlaces, kFetch>(places(), to, Shape::pack_slot(p), row,
                                                              Shape::column(rank, p), Shape::valid(rank, p));
      }
    }
  }
  DEVICE void ask_in_place(int64 row, int p) {
    // Its neighbours have read what this thread copied.
    if constexpr (!Load::kVectors) warp_barrier();
    if (row < rows) {
      // Checked, or ptxas has the addresses of all packs at once: LayerNorm of 262144 columns spilled 52 bytes.
      load.template copy<Shape::kCapacity, kPlaces, kFetch>(
          places(), place(0), Shape::pack_slot(p), row, Shape::column(rank, p), Shape::template valid<true>(rank, p));
    }
  }
  DEVICE static void sent() { copies_commit(); }
  DEVICE static void arrived() { copies_wait<kAhead - 1>(); }
  DEVICE void take(int64 row) {
    taken = taken == kStages - 1 ? 0 : taken + 1;
    active = Shape::kThreads >= 32 || row < rows;
    row_taken = row;
    // A lane finds there what others copied, and has read what it will fill again.
    if constexpr (!Load::kVectors) warp_barrier();
    if constexpr (kRowsStay) {
      typename Load::Raw raws[Shape::kPacks];
      load.template read_covering<Shape, kPlaces>(raws, places(), place(taken), row, rank);
#pragma unroll
      for (int p = 0; p < Shape::kPacks; ++p) kept[p] = load.keep(raws[p], Shape::valid(rank, p));
    }
  }
  DEVICE void read(typename Load::Packed& pack, int p) {
    if constexpr (kRowsStay) {
      load.stay_packed(kept[p]);  // or the values of the last reading are kept
      pack = kept[p];
    } else {
      typename Load::Raw raw;
      int64 of = row_taken;
      // Or the row's address is kept for both readings, which spilled 4 bytes of 262141 columns; of six packs 44
      // without.
      if constexpr (!Load::kVectors && Shape::kPacks <= 4) forget(of);
      const PackSlot slot = Shape::pack_slot(p);
      const int valid = Shape::valid(rank, p);
      if constexpr (Load::kVectors) {
        load.template read<Shape::kCapacity, kPlaces>(raw, places(), place(taken), slot);
      } else {
        load.template read_covering<Shape::kCapacity, kPlaces>(raw, places(), place(taken), slot, of, valid);
      }
      load.stands_at(raw, row_taken, Shape::column(rank, p));
      pack = load.keep(raw, valid);
    }
    if (Shape::kThreads < 32 && !active) pack = {};
  }
  DEVICE void stay_packed(int) {}

 private:
  DEVICE char* places() const { return dynamic_shared() + offset; }
  DEVICE int place(int stage) const { return stage * kRows + row_group; }
};

}  // namespace cunorm
