// Where the rows that a thread works on wait, from the start of their loads to their last use: in registers or in
// shared memory. Either way a thread sees the same vectors in the same order, so results do not depend on it.
//
//   kAhead                     how many rows to prefetch before the first is taken
//   kPrefetchEarly             whether to prefetch the next row as soon as a row is taken, or when its sums are known
//   kInRegisters               whether a thread keeps its vectors of a row in registers
//   kInPlace                   whether the next row overwrites the present one, vector by vector
//   prefetch(row, ahead)       starts the loads of `row`, which comes `ahead` rows after the next that will be taken
//   prefetch_in_place(row, p)  the same for vector number p alone, which has just been read for the last time
//   sent()                     ends the loads that one iteration starts, those of all matrices
//   arrived()                  waits for all matrices of the next iteration
//   take(row)                  makes the next prefetched row the one to read
//   read(vector, p)            reads this thread's vector number p of it
//   keep_packed(p)             between two uses: keeps the vector, drops what was computed from it
#pragma once
#include "rows/load.cuh"
#include "rows/row.cuh"

namespace cunorm {

// Which rows a kernel that adds rows up walks over, by their indices among them: all,
struct AllRows {
  DEVICE static int64 count(int64 rows) { return rows; }
  DEVICE static int64 of(int64 index) { return index; }
};

// or those of a group, which blockIdx.z says: `inner` neighbours, as many again after those of all other groups. A
// index beyond the last is a row beyond all.
struct RowsOfGroup {
  int64 group_rows;
  int64 inner;
  int64 groups;
  int64 reciprocal;  // of inner
  DEVICE int64 count(int64) const { return group_rows; }
  DEVICE int64 of(int64 index) const {
    return index + (quotient(index, reciprocal) * (groups - 1) + blockIdx.z) * inner;
  }
};

template <class Shape, class Load>
struct RegisterRows {
  static constexpr int kBytes = 0;
  static constexpr int kAhead = 0;
  static constexpr bool kPrefetchEarly = true;
  static constexpr bool kInRegisters = true;
  static constexpr bool kInPlace = false;
  Load load;
  int rank;
  int64 rows;
  typename Load::Packed now[Shape::kVectors];

  DEVICE RegisterRows(Load load, int rank, int64 rows, int) : load(load), rank(rank), rows(rows) {}

  DEVICE static void prefetch(int64, int) {}
  DEVICE static void sent() {}
  DEVICE static void arrived() {}
  DEVICE void take(int64 row) {
    typename Load::template Loading<Shape> loading;
    // A row past the end, beside rows of the same warp that are not, counts as zeros.
    const bool active = Shape::kThreads >= 32 || row < rows;
    load.template start<Shape>(loading, row, rank, active);
    load.template receive<Shape>(now, loading, row, rank, active);
  }
  DEVICE void read(typename Load::Packed& vector, int p) const { vector = now[p]; }
  DEVICE void keep_packed(int p) { load.keep_packed(now[p]); }
};

// A ring of kStages buffers for each of the kRows rows of a CTA, filled by asynchronous copies: rows are under way
// whatever the threads do, and take no registers. A thread reads only what it copied itself, so nobody waits for
// anybody; of vectors at odd addresses, what it and its neighbours copied (SharedVectors), which it shifts. With
// kRowsInRegisters it reads them once, when they have come, and keeps them in registers. What it copied itself has then
// a free buffer, so that as many rows are under way by a buffer fewer: LayerNorm forward of 12288 columns, 8 M
// elements, 10.9 us by one buffer, 11.8 by two and a reading for each use. Rows at odd addresses would have to wait for
// their neighbours: backward of 1045 columns 125 us, by a buffer more 117.
//
// A single buffer of rows that are not kept is filled again in place: float32 of which two rows are more than shared
// memory has, LayerNorm backward of 262144 columns, H100, 288 us, streamed 635.
//
// With kTogether the lanes of a warp copy its rows together: neighbouring lanes copy neighbouring vectors, and each
// reads its own ones when all have come. Where two threads hold a row, a warp whose threads copied their own vectors
// would ask for parts of 16 lines at once (docs/tuning.md).
template <class Shape, int kRows, int kStages, bool kPrefetchEarly_, bool kRowsInRegisters, class Load,
          bool kTogether = false>
struct SharedRows {
  // Rows of neighbouring threads lie side by side: with the buffers of a row side by side 32 columns fell from 0.86 to
  // 0.77 of the roof, by bank conflicts.
  static constexpr int kBuffers = kStages * kRows;
  static constexpr int kBytes = kBuffers * Load::buffer_bytes(Shape::kCapacity);
  static constexpr bool kInPlace = kStages == 1 && !kRowsInRegisters;
  static constexpr bool kAlone = Load::kVectorized && !kTogether;  // whether a thread reads what it copied itself
  static constexpr int kAhead = kInPlace ? 1 : kStages - 1 + (kRowsInRegisters && kAlone);
  static constexpr bool kPrefetchEarly = kPrefetchEarly_;
  static constexpr bool kInRegisters = kRowsInRegisters;
  static_assert(!(kInPlace && kPrefetchEarly), "a row in place is loaded when the one before it has been read");
  static_assert(!kTogether || (kStages > 1 && Shape::kLanes < 32 && Shape::kWholeVectors && Load::kVectorized));
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
  typename Load::Packed kept[kRowsInRegisters ? Shape::kVectors : 1];

  DEVICE SharedRows(Load load, int rank, int64 rows, int offset)
      : load(load),
        rank(rank),
        rows(rows),
        offset(offset),
        row_group(row_group_of_thread<Shape, kRows, Load::kVectorized>()) {
    // Vectors beyond the row: nothing will be copied there. With a check at every read backward of 131072 cols ran at
    // 0.80 of the roof, without at 0.95.
#pragma unroll
    for (int p = 0; p < Shape::kVectors; ++p) {
      if (Shape::valid(rank, p) > 0) continue;
      for (int stage = 0; stage < kStages; ++stage)
        load.template clear<Shape::kCapacity, kBuffers>(buffers(), buffer(stage), Shape::vector_slot(p));
    }
  }

  DEVICE void prefetch(int64 row, int ahead) {
    const int iteration = taken + 1 + ahead;
    const int to = buffer(iteration < kStages ? iteration : iteration - kStages);
    if constexpr (kTogether) {
      copy_together(row, to);
    } else if (row < rows) {
      // By ones six vectors at odd addresses spilled 4 bytes, by twos four of them 44.
#pragma unroll(Load::kVectorized || kRowsInRegisters ? Shape::kVectors : Shape::kVectors > 4 ? 2 : 1)
      for (int p = 0; p < Shape::kVectors; ++p) {
        load.template copy<Shape::kCapacity, kBuffers, kFetch>(buffers(), to, Shape::vector_slot(p), row,
                                                               Shape::column(rank, p), Shape::valid(rank, p));
      }
    }
  }
  DEVICE void prefetch_in_place(int64 row, int p) {
    // Its neighbours have read what this thread copied.
    if constexpr (!Load::kVectorized) warp_barrier();
    if (row < rows) {
      // Checked, or ptxas has the addresses of all vectors at once: LayerNorm of 262144 columns spilled 52 bytes.
      load.template copy<Shape::kCapacity, kBuffers, kFetch>(buffers(), buffer(0), Shape::vector_slot(p), row,
                                                             Shape::column(rank, p),
                                                             Shape::template valid<true>(rank, p));
    }
  }
  DEVICE static void sent() { copies_commit(); }
  DEVICE static void arrived() { copies_wait<kAhead - 1>(); }
  DEVICE void take(int64 row) {
    taken = taken == kStages - 1 ? 0 : taken + 1;
    active = Shape::kThreads >= 32 || row < rows;
    row_taken = row;
    // A lane finds there what others copied, and has read what it will fill again.
    if constexpr (!kAlone) warp_barrier();
    if constexpr (kRowsInRegisters) {
      typename Load::Raw raws[Shape::kVectors];
      load.template read_covering<Shape, kBuffers>(raws, buffers(), buffer(taken), row, rank);
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) kept[p] = load.keep(raws[p], Shape::valid(rank, p));
    }
  }
  DEVICE void read(typename Load::Packed& vector, int p) {
    if constexpr (kRowsInRegisters) {
      load.keep_packed(kept[p]);  // or the values of the last reading are kept
      vector = kept[p];
    } else {
      typename Load::Raw raw;
      int64 of = row_taken;
      // Or the row's address is kept for both readings, which spilled 4 bytes of 262141 columns; of six vectors 44
      // without.
      if constexpr (!Load::kVectorized && Shape::kVectors <= 4) forget(of);
      const VectorSlot slot = Shape::vector_slot(p);
      const int valid = Shape::valid(rank, p);
      if constexpr (Load::kVectorized) {
        load.template read<Shape::kCapacity, kBuffers>(raw, buffers(), buffer(taken), slot);
      } else {
        load.template read_covering<Shape::kCapacity, kBuffers>(raw, buffers(), buffer(taken), slot, of, valid);
      }
      load.stands_at(raw, row_taken, Shape::column(rank, p));
      vector = load.keep(raw, valid);
    }
    if (Shape::kThreads < 32 && !active) vector = {};
  }
  DEVICE void keep_packed(int) {}

 private:
  DEVICE char* buffers() const { return dynamic_shared() + offset; }
  DEVICE int buffer(int stage) const { return stage * kRows + row_group; }

  // `row` and buffer number `to` are those of this thread; the warp's rows are neighbours, and their buffers too.
  DEVICE void copy_together(int64 row, int to) const {
    constexpr unsigned kVectorsOfRow = Shape::kCols / Shape::kVectorSize,
                       kVectorsOfWarp = 32 / Shape::kThreads * kVectorsOfRow;
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (unsigned p = 0; p < Shape::kVectors; ++p) {
      const unsigned index = p * 32 + lane, vector = index % kVectorsOfRow;
      const int behind = static_cast<int>(index / kVectorsOfRow) - static_cast<int>(lane / Shape::kThreads);
      if (index < kVectorsOfWarp && row + behind < rows) {
        const VectorSlot slot = {vector % Shape::kThreads, static_cast<int>(vector / Shape::kThreads)};
        load.template copy<Shape::kCapacity, kBuffers, kFetch>(buffers(), to + behind, slot, row + behind,
                                                               vector * Shape::kVectorSize, Shape::kVectorSize);
      }
    }
  }
};

}  // namespace cunorm
