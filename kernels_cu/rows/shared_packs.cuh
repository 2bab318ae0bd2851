// Packs in shared memory: copied there asynchronously, and read by the threads that copied them.
#pragma once
#include "rows/pack_access.cuh"
#include "rows/row.cuh"

namespace cunorm {

// How packs lie in shared memory: the packs that kLanes neighbouring threads read at once are a run. A pack of more
// than 16 bytes lies there in pieces, the first pieces of all packs of the run side by side, then the second, so that
// neighbouring threads meet no bank conflicts.
//
// A run whose packs begin anywhere is copied as the aligned words that hold it, to places that lie in the same way to a
// multiple of kRunGap bytes, and takes so much more; once it is there, packs are read from there and put where they
// belong.
template <class T, int kPack, int kLanes, Access kAccess>
struct SharedPacks {
  static constexpr bool kAligned = kAccess != Access::kAnywhere;
  static constexpr int kBytes = kPack * sizeof(T);
  static constexpr int kPiece = kUnit<T, kPack>;
  static constexpr int kPieces = kBytes / kPiece;
  static constexpr int kWords = kPiece / 4;
  static constexpr int kRun = kLanes * kBytes + (kAligned ? 0 : kRunGap);
  static constexpr int bytes(int columns) { return columns / (kPack * kLanes) * kRun; }

  template <class Place>  // char, const or not
  DEVICE static Place* piece(Place* place, PackSlot slot, int i) {
    return place + (slot.run + slot.thread / kLanes) * kRun + slot.thread % kLanes * kPiece + i * kLanes * kPiece;
  }

  // Copies the first `valid` columns, asynchronously where the pack is whole; the others become zero.
  template <Fetch kFetch>
  DEVICE static void copy(char* place, PackSlot slot, const T* row, int64 column, int valid) {
    if constexpr (!kAligned) {
      copy_covering<kFetch>(place, slot, row, column, valid);
    } else if (valid >= kPack) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        copy_async<kPiece, kFetch>(piece(place, slot, i), reinterpret_cast<const char*>(row + column) + i * kPiece);
    } else if constexpr (kAccess == Access::kAligned) {
      if (valid <= 0) return;
      Pack<T, kPack> pack;
      load_pack<Access::kAligned, Cache::kStreamed>(pack, row, column, valid);
      put(place, slot, pack);
    }
  }

  // What was copied of a pack. Of several arrays some may be aligned beside others that are not.
  DEVICE static void read_covering(Pack<T, kPack>& pack, const char* place, PackSlot slot, const T* row, int valid) {
    if constexpr (kAligned) {
      read(pack, place, slot);
    } else {
      with_known<sizeof(T), kPiece>(past_multiple_of<kPiece>(row),
                                    [&](uint32 offset) { read_shifted(pack, place, slot, row, offset, valid); });
    }
  }

  // All packs that this thread has of the row.
  template <class Shape>
  DEVICE static void read_covering(Pack<T, kPack> (&packs)[Shape::kPacks], const char* place, const T* row, int rank) {
    if constexpr (kAligned) {
#pragma unroll
      for (int p = 0; p < Shape::kPacks; ++p) read(packs[p], place, Shape::pack_slot(p));
    } else {
      with_known<sizeof(T), kPiece>(past_multiple_of<kPiece>(row), [&](uint32 offset) {
#pragma unroll
        for (int p = 0; p < Shape::kPacks; ++p) {
          read_shifted(packs[p], place, Shape::pack_slot(p), row, offset, Shape::valid(rank, p));
        }
      });
    }
  }

  DEVICE static void put(char* place, PackSlot slot, const Pack<T, kPack>& pack) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint32 words[kWords];
#pragma unroll
      for (int word = 0; word < kWords; ++word) words[word] = pack.words[i * kWords + word];
      store_shared_words(piece(place, slot, i), words);
    }
  }

  DEVICE static void read(Pack<T, kPack>& pack, const char* place, PackSlot slot) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint32 words[kWords];
      load_shared_words(piece(place, slot, i), words);
#pragma unroll
      for (int word = 0; word < kWords; ++word) pack.words[i * kWords + word] = words[word];
    }
  }

 private:
  DEVICE static int lane(PackSlot slot) { return slot.thread % kLanes; }

  // Where the aligned word belongs in which the pack begins. (A run begins as far behind a multiple of kRunGap as its
  // row does, but for runs of less.)
  template <class Place>
  DEVICE static Place* covering_place(Place* place, PackSlot slot, const T* row) {
    return piece(place, slot, 0) + lane(slot) * (kBytes - kPiece) + past_multiple_of<kRunGap>(row) / kPiece * kPiece;
  }

  // A pack that begins `offset` bytes behind a multiple of its size, as its row does.
  DEVICE static void read_shifted(Pack<T, kPack>& pack, const char* place, PackSlot slot, const T* row, uint32 offset,
                                  int valid) {
    uint32 words[kWords * (kPieces + 1)];
    const char* const covering = covering_place(place, slot, row);
#pragma unroll
    for (int i = 0; i <= kPieces; ++i) {
      uint32 unit[kWords];
      load_shared_words(covering + i * kPiece, unit);
#pragma unroll
      for (int word = 0; word < kWords; ++word) words[i * kWords + word] = unit[word];
    }
    shift_down<T, kPiece / 8>(words, offset);
    keep_valid<Access::kAnywhere>(pack, words, valid);
  }

  // A lane copies the words that hold its pack, but for the one in which the pack before ends: that lane copies it.
  template <Fetch kFetch>
  DEVICE static void copy_covering(char* place, PackSlot slot, const T* row, int64 column, int valid) {
    const int offset = static_cast<int>(past_multiple_of<kPiece>(row)), size = sizeof(T);
    const char* const first = reinterpret_cast<const char*>(row) - offset + column * size;
    char* const to = covering_place(place, slot, row);
    if (valid > 0 && (offset == 0 || lane(slot) == 0)) copy_covering_async<kPiece, kFetch>(to, first);
#pragma unroll
    for (int i = kPiece; i <= kBytes; i += kPiece) {
      if (i < offset + valid * size) copy_covering_async<kPiece, kFetch>(to + i, first + i);
    }
  }
};

}  // namespace cunorm
