// Uniform random numbers that nobody stores: of a seed, a row and a column they are the same in every kernel, whoever
// holds them, and on the host (cunorm/norm/philox.py).
#pragma once
#include "rows/row.cuh"

namespace cunorm {

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011).
struct Philox {
  uint32 words[4];

  DEVICE Philox(uint32 low_seed, uint32 high_seed, int64 row, uint32 octet)
      : words{octet, 0, static_cast<uint32>(row), static_cast<uint32>(row >> 32)} {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const auto first = static_cast<unsigned long long>(words[0]) * 0xd2511f53u;
      const auto second = static_cast<unsigned long long>(words[2]) * 0xcd9e8d57u;
      words[0] = static_cast<uint32>(second >> 32) ^ words[1] ^ low_seed;
      words[1] = static_cast<uint32>(second);
      words[2] = static_cast<uint32>(first >> 32) ^ words[3] ^ high_seed;
      words[3] = static_cast<uint32>(first);
      low_seed += 0x9e3779b9u;
      high_seed += 0xbb67ae85u;
    }
  }
};

// A matrix of such numbers, multiples of 2^-16 from 0 up to 1, as lists of matrices have it (load.cuh). A thread
// keeps where its vector is, and makes the numbers where they are used: they take no memory and no copy.
template <int kVectorSize_>
struct RandomRows {
  static constexpr int kVectorSize = kVectorSize_;
  static_assert(8 % kVectorSize == 0, "a vector is of one draw");
  static constexpr int kColumnBytes = 0;
  static constexpr bool kVectorized = true;
  struct Packed {
    int64 row;
    uint32 column;
  };
  uint32 low_seed;
  uint32 high_seed;

  DEVICE void fetch(Packed& vector, int64 row, int64 column, int) const { stands_at(vector, row, column); }
  template <class Compute>
  DEVICE void unpack(const Packed& vector, Compute (&values)[kVectorSize]) const {
    const Philox drawn(low_seed, high_seed, vector.row, vector.column / 8);
    // An index that only a launch knows would put the words into memory.
    uint32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = drawn.words[i];
    if constexpr (kVectorSize < 8) {
      const bool second_half = vector.column & 4;
      words[0] = second_half ? words[2] : words[0];
      words[1] = second_half ? words[3] : words[1];
    }
    if constexpr (kVectorSize < 4) words[0] = vector.column & 2 ? words[1] : words[0];
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      const bool upper = kVectorSize == 1 ? vector.column & 1 : i % 2 == 1;
      const uint32 of_two = words[i / 2];
      values[i] = static_cast<Compute>(static_cast<int>(upper ? of_two >> 16 : of_two & 0xffff)) * Compute(0x1p-16);
    }
  }
  DEVICE void keep_packed(Packed&) const {}

  template <class Shape>
  struct Loading {};
  template <class Shape>
  DEVICE void start(Loading<Shape>&, int64, int, bool) const {}
  template <class Shape>
  DEVICE void receive(Packed (&vectors)[Shape::kVectors], const Loading<Shape>&, int64 row, int rank, bool) const {
    read_covering<Shape>(vectors, nullptr, row, rank);
  }
  static constexpr int buffer_bytes(int) { return 0; }
  template <Fetch kFetch>
  DEVICE void copy(char*, VectorSlot, int64, int64, int) const {}
  DEVICE void read_covering(Packed&, const char*, VectorSlot, int64, int) const {}
  template <class Shape>
  DEVICE void read_covering(Packed (&vectors)[Shape::kVectors], const char*, int64 row, int rank) const {
#pragma unroll
    for (int p = 0; p < Shape::kVectors; ++p) stands_at(vectors[p], row, Shape::column(rank, p));
  }
  DEVICE void clear(char*, VectorSlot) const {}
  DEVICE void put(char*, VectorSlot, const Packed&) const {}
  DEVICE void read(Packed&, const char*, VectorSlot) const {}
  DEVICE void stands_at(Packed& vector, int64 row, int64 column) const { vector = {row, static_cast<uint32>(column)}; }
};

}  // namespace cunorm
