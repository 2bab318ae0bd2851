// Vectors in shared memory: copied there asynchronously, and read by the threads that copied them.
#pragma once
#include "rows/vector_access.cuh"
#include "rows/row.cuh"

namespace cunorm {

// How vectors lie in shared memory: the vectors that kLanes neighbouring threads read at once are a run. A vector of
// more than 16 bytes lies there in pieces, the first pieces of all vectors of the run side by side, then the second, so
// that neighbouring threads meet no bank conflicts.
//
// A run whose vectors begin anywhere is copied as the aligned words that hold it, to buffers that lie in the same way
// to a multiple of kRunGap bytes, and takes so much more; once it is there, vectors are read from there and put where
// they belong.
template <class T, int kVectorSize, int kLanes, Access kAccess>
struct SharedVectors {
  static constexpr bool kAligned = kAccess != Access::kAnywhere;
  static constexpr int kBytes = kVectorSize * sizeof(T);
  static constexpr int kPiece = kUnit<T, kVectorSize>;
  static constexpr int kPieces = kBytes / kPiece;
  static constexpr int kWords = kPiece / 4;
  static constexpr int kRun = kLanes * kBytes + (kAligned ? 0 : kRunGap);
  static constexpr int bytes(int columns) { return columns / (kVectorSize * kLanes) * kRun; }

  template <class Byte>  // char, const or not
  DEVICE static Byte* piece(Byte* buffer, VectorSlot slot, int i) {
    return buffer + (slot.run + slot.thread / kLanes) * kRun + slot.thread % kLanes * kPiece + i * kLanes * kPiece;
  }

  // Copies the first `valid` columns, asynchronously where the vector is whole; the others become zero.
  template <Fetch kFetch>
  DEVICE static void copy(char* buffer, VectorSlot slot, const T* row, int64 column, int valid) {
    if constexpr (!kAligned) {
      copy_covering<kFetch>(buffer, slot, row, column, valid);
    } else if (valid >= kVectorSize) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        copy_async<kPiece, kFetch>(piece(buffer, slot, i), reinterpret_cast<const char*>(row + column) + i * kPiece);
    } else if constexpr (kAccess == Access::kAligned) {
      if (valid <= 0) return;
      Vector<T, kVectorSize> vector;
      load_vector<Access::kAligned, Cache::kStreamed>(vector, row, column, valid);
      put(buffer, slot, vector);
    }
  }

  // What was copied of a vector. Of several arrays some may be aligned beside others that are not.
  DEVICE static void read_covering(Vector<T, kVectorSize>& vector, const char* buffer, VectorSlot slot, const T* row,
                                   int valid) {
    if constexpr (kAligned) {
      read(vector, buffer, slot);
    } else {
      with_known<sizeof(T), kPiece>(past_multiple_of<kPiece>(row),
                                    [&](uint32 offset) { read_shifted(vector, buffer, slot, row, offset, valid); });
    }
  }

  // All vectors that this thread has of the row.
  template <class Shape>
  DEVICE static void read_covering(Vector<T, kVectorSize> (&vectors)[Shape::kVectors], const char* buffer, const T* row,
                                   int rank) {
    if constexpr (kAligned) {
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) read(vectors[p], buffer, Shape::vector_slot(p));
    } else {
      with_known<sizeof(T), kPiece>(past_multiple_of<kPiece>(row), [&](uint32 offset) {
#pragma unroll
        for (int p = 0; p < Shape::kVectors; ++p) {
          read_shifted(vectors[p], buffer, Shape::vector_slot(p), row, offset, Shape::valid(rank, p));
        }
      });
    }
  }

  DEVICE static void put(char* buffer, VectorSlot slot, const Vector<T, kVectorSize>& vector) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint32 words[kWords];
#pragma unroll
      for (int word = 0; word < kWords; ++word) words[word] = vector.words[i * kWords + word];
      store_shared_words(piece(buffer, slot, i), words);
    }
  }

  DEVICE static void read(Vector<T, kVectorSize>& vector, const char* buffer, VectorSlot slot) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint32 words[kWords];
      load_shared_words(piece(buffer, slot, i), words);
#pragma unroll
      for (int word = 0; word < kWords; ++word) vector.words[i * kWords + word] = words[word];
    }
  }

 private:
  DEVICE static int lane(VectorSlot slot) { return slot.thread % kLanes; }

  // Where the aligned word belongs in which the vector begins. (A run begins as far behind a multiple of kRunGap as its
  // row does, but for runs of less.)
  template <class Byte>
  DEVICE static Byte* covering_buffer(Byte* buffer, VectorSlot slot, const T* row) {
    return piece(buffer, slot, 0) + lane(slot) * (kBytes - kPiece) + past_multiple_of<kRunGap>(row) / kPiece * kPiece;
  }

  // A vector that begins `offset` bytes behind a multiple of its size, as its row does.
  DEVICE static void read_shifted(Vector<T, kVectorSize>& vector, const char* buffer, VectorSlot slot, const T* row,
                                  uint32 offset, int valid) {
    uint32 words[kWords * (kPieces + 1)];
    const char* const covering = covering_buffer(buffer, slot, row);
#pragma unroll
    for (int i = 0; i <= kPieces; ++i) {
      uint32 unit[kWords];
      load_shared_words(covering + i * kPiece, unit);
#pragma unroll
      for (int word = 0; word < kWords; ++word) words[i * kWords + word] = unit[word];
    }
    shift_down<T, kPiece / 8>(words, offset);
    keep_valid<Access::kAnywhere>(vector, words, valid);
  }

  // A lane copies the words that hold its vector, but for the one in which the vector before ends: that lane copies it.
  template <Fetch kFetch>
  DEVICE static void copy_covering(char* buffer, VectorSlot slot, const T* row, int64 column, int valid) {
    const int offset = static_cast<int>(past_multiple_of<kPiece>(row)), size = sizeof(T);
    const char* const first = reinterpret_cast<const char*>(row) - offset + column * size;
    char* const to = covering_buffer(buffer, slot, row);
    if (valid > 0 && (offset == 0 || lane(slot) == 0)) copy_covering_async<kPiece, kFetch>(to, first);
#pragma unroll
    for (int i = kPiece; i <= kBytes; i += kPiece) {
      if (i < offset + valid * size) copy_covering_async<kPiece, kFetch>(to + i, first + i);
    }
  }
};

}  // namespace cunorm
