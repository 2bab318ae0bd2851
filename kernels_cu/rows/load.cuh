// What a kernel reads: lists of matrices, and of operands with a value for each column, which all rows share. A Load
// has
//
//   Raw, Packed                                            a vector as it is in memory, and what a thread keeps of it
//   fetch(raw, row, column, valid)                         starts the read of a vector
//   keep(raw, valid)                                       what is kept of it
//   start(loading, row, rank, active)                      starts the reads of all vectors of a thread
//   receive(vectors, loading, row, rank, active)           waits for them
//   unpack(packed, values)                                 its values in Compute
//   keep_packed(packed)                                    between two uses: drops the values, keeps the vector
//   copy(buffers, number, slot, row, column, valid)        starts the copy of a vector to shared memory
//   read_covering(raw, buffers, number, slot, row, valid)  reads a vector that was copied from any address
//   read_covering(raws, buffers, number, row, rank)        reads all vectors of this thread, wherever they begin
//   clear(buffers, number, slot)                           writes zeros, for a vector that is never copied
//   put(buffers, number, slot, packed)                     writes a vector that is there already
//   read(raw, buffers, number, slot)                       reads a vector that was copied, cleared or put
//   stands_at(raw, row, column)                            after read: for what no buffer holds (philox.cuh,
//                                                          row_numbers.cuh)
//   buffer_bytes(columns)                                  shared memory for a row
#pragma once
#include "rows/functions.cuh"
#include "rows/philox.cuh"
#include "rows/row_numbers.cuh"
#include "rows/shared_vectors.cuh"

namespace cunorm {

// Rows of a matrix whose columns are contiguous. An operand that all rows share is a matrix whose rows are 0 apart.
// kLanes neighbouring threads of a warp hold neighbouring vectors of a row.
template <class T, int kVectorSize_, int kLanes, Access kAccess, Cache kCache, bool kTwoStrides = false,
          class Starts = RowStarts<kTwoStrides>>
struct LoadRows {
  static constexpr int kVectorSize = kVectorSize_;
  using Shared = SharedVectors<T, kVectorSize, kLanes, kAccess>;
  static constexpr int kColumnBytes = sizeof(T);
  static constexpr bool kVectorized = kAccess != Access::kAnywhere;
  using Packed = Vector<T, kVectorSize>;
  const T* data;
  Starts starts;

  DEVICE void fetch(Packed& vector, int64 row, int64 column, int valid) const {
    load_vector<kAccess, kCache>(vector, data + starts.of(row), column, valid);
  }
  template <class Shape>
  struct Loading {
    Covering<T, kVectorSize, kAccess> vectors[Shape::kVectors];
  };
  template <class Shape>
  DEVICE void start(Loading<Shape>& loading, int64 row, int rank, bool active) const {
    start_loads<Shape, kCache>(loading.vectors, data + starts.of(row), rank, active);
  }
  template <class Shape>
  DEVICE void receive(Packed (&vectors)[Shape::kVectors], const Loading<Shape>& loading, int64 row, int rank,
                      bool active) const {
    receive_vectors<Shape>(vectors, loading.vectors, data + starts.of(row), rank, active);
  }
  // The same of one vector. Columns past the last are whatever lies there.
  using LoadingVector = Covering<T, kVectorSize, kAccess>;
  DEVICE void start(LoadingVector& loading, int64 row, int64 column, int valid) const {
    load_covering<kCache>(loading, data + starts.of(row), column, valid);
  }
  DEVICE void receive(Packed& vector, LoadingVector loading, int64 row) const {
    constexpr int kBytes = kUnit<T, kVectorSize>;
    if constexpr (!kVectorized)
      shift_down<T, kBytes / 8>(loading.words, past_multiple_of<kBytes>(data + starts.of(row)));
#pragma unroll
    for (int i = 0; i < Packed::kWords; ++i) vector.words[i] = loading.words[i];
  }
  template <class Compute>
  DEVICE void unpack(const Packed& vector, Compute (&values)[kVectorSize]) const {
    cunorm::unpack(vector, values);
  }
  DEVICE void keep_packed(Packed& vector) const { cunorm::keep_packed(vector); }
  static constexpr int buffer_bytes(int columns) { return Shared::bytes(columns); }
  template <Fetch kFetch>
  DEVICE void copy(char* buffer, VectorSlot slot, int64 row, int64 column, int valid) const {
    Shared::template copy<kFetch>(buffer, slot, data + starts.of(row), column, valid);
  }
  DEVICE void read_covering(Packed& vector, const char* buffer, VectorSlot slot, int64 row, int valid) const {
    Shared::read_covering(vector, buffer, slot, data + starts.of(row), valid);
  }
  template <class Shape>
  DEVICE void read_covering(Packed (&vectors)[Shape::kVectors], const char* buffer, int64 row, int rank) const {
    Shared::template read_covering<Shape>(vectors, buffer, data + starts.of(row), rank);
  }
  DEVICE void clear(char* buffer, VectorSlot slot) const {
    if constexpr (kVectorized) Shared::put(buffer, slot, {});
  }
  DEVICE void put(char* buffer, VectorSlot slot, const Packed& vector) const { Shared::put(buffer, slot, vector); }
  DEVICE void read(Packed& vector, char* buffer, VectorSlot slot) const { Shared::read(vector, buffer, slot); }
  DEVICE void stands_at(Packed&, int64, int64) const {}
};

// An operand that all rows or a group of them share, and that begins at an odd address. It is read again for every row:
// shifted beside a row at odd addresses too it spilled 4 to 72 bytes.
template <class T, int kVectorSize, int kLanes, class Starts = RowStarts<false>>
struct LoadElements : LoadRows<T, kVectorSize, kLanes, Access::kAnywhere, Cache::kKept, false, Starts> {
  DEVICE void fetch(Vector<T, kVectorSize>& vector, int64 row, int64 column, int valid) const {
    load_elements(vector, this->data + this->starts.of(row), column, valid);
  }
};

// Several matrices that are read together. In shared memory all buffers of the first come before those of the second:
// with the matrices of a row side by side neighbouring rows of 32 columns would meet in the same banks.
template <class... Loads>
struct Matrices;

template <>
struct Matrices<> {
  static constexpr int kCount = 0;
  static constexpr int kColumnBytes = 0;
  static constexpr bool kVectorized = true;
  struct Packed {};
  using Raw = Packed;

  DEVICE void fetch(Raw&, int64, int64, int) const {}
  template <class Shape>
  struct Loading {};
  template <class Shape>
  DEVICE void start(Loading<Shape>&, int64, int, bool) const {}
  template <class Shape>
  DEVICE void receive(Packed (&)[Shape::kVectors], const Loading<Shape>&, int64, int, bool) const {}
  DEVICE Packed keep(const Raw& raw, int) const { return raw; }
  template <class Values>
  DEVICE void unpack(const Packed&, Values) const {}
  DEVICE void keep_packed(Packed&) const {}
  static constexpr int buffer_bytes(int) { return 0; }
  template <int kColumns, int kBuffers, Fetch kFetch>
  DEVICE void copy(char*, int, VectorSlot, int64, int64, int) const {}
  template <int kColumns, int kBuffers>
  DEVICE void read_covering(Raw&, char*, int, VectorSlot, int64, int) const {}
  template <class Shape, int kBuffers>
  DEVICE void read_covering(Raw (&)[Shape::kVectors], char*, int, int64, int) const {}
  template <int kColumns, int kBuffers>
  DEVICE void clear(char*, int, VectorSlot) const {}
  template <int kColumns, int kBuffers>
  DEVICE void put(char*, int, VectorSlot, const Packed&) const {}
  template <int kColumns, int kBuffers>
  DEVICE void read(Raw&, char*, int, VectorSlot) const {}
  DEVICE void stands_at(Raw&, int64, int64) const {}
};

template <class First, class... Others>
struct Matrices<First, Others...> {
  static constexpr int kVectorSize = First::kVectorSize;
  static constexpr int kCount = 1 + sizeof...(Others);
  static constexpr int kColumnBytes = First::kColumnBytes + Matrices<Others...>::kColumnBytes;
  static constexpr bool kVectorized = First::kVectorized;
  struct Packed {
    typename First::Packed first;
    typename Matrices<Others...>::Packed others;
  };
  using Raw = Packed;
  First first;
  Matrices<Others...> others;

  DEVICE void fetch(Raw& raw, int64 row, int64 column, int valid) const {
    first.fetch(raw.first, row, column, valid);
    others.fetch(raw.others, row, column, valid);
  }
  template <class Shape>
  struct Loading {
    typename First::template Loading<Shape> first;
    typename Matrices<Others...>::template Loading<Shape> others;
  };
  template <class Shape>
  DEVICE void start(Loading<Shape>& loading, int64 row, int rank, bool active) const {
    first.template start<Shape>(loading.first, row, rank, active);
    others.template start<Shape>(loading.others, row, rank, active);
  }
  template <class Shape>
  DEVICE void receive(Packed (&vectors)[Shape::kVectors], const Loading<Shape>& loading, int64 row, int rank,
                      bool active) const {
    typename First::Packed own[Shape::kVectors];
    typename Matrices<Others...>::Packed rest[Shape::kVectors];
    first.template receive<Shape>(own, loading.first, row, rank, active);
    others.template receive<Shape>(rest, loading.others, row, rank, active);
#pragma unroll
    for (int p = 0; p < Shape::kVectors; ++p) vectors[p] = {own[p], rest[p]};
  }
  DEVICE Packed keep(const Raw& raw, int) const { return raw; }
  // values: [matrix][column]
  template <class Compute>
  DEVICE void unpack(const Packed& packed, Compute (*values)[kVectorSize]) const {
    first.unpack(packed.first, values[0]);
    others.unpack(packed.others, values + 1);
  }
  DEVICE void keep_packed(Packed& packed) const {
    first.keep_packed(packed.first);
    others.keep_packed(packed.others);
  }
  static constexpr int buffer_bytes(int columns) {
    return First::buffer_bytes(columns) + Matrices<Others...>::buffer_bytes(columns);
  }
  template <int kColumns, int kBuffers, Fetch kFetch>
  DEVICE void copy(char* buffers, int number, VectorSlot slot, int64 row, int64 column, int valid) const {
    first.template copy<kFetch>(buffer<kColumns>(buffers, number), slot, row, column, valid);
    others.template copy<kColumns, kBuffers, kFetch>(buffers_of_others<kColumns, kBuffers>(buffers), number, slot, row,
                                                     column, valid);
  }
  template <int kColumns, int kBuffers>
  DEVICE void read_covering(Raw& raw, char* buffers, int number, VectorSlot slot, int64 row, int valid) const {
    first.read_covering(raw.first, buffer<kColumns>(buffers, number), slot, row, valid);
    others.template read_covering<kColumns, kBuffers>(raw.others, buffers_of_others<kColumns, kBuffers>(buffers),
                                                      number, slot, row, valid);
  }
  template <class Shape, int kBuffers>
  DEVICE void read_covering(Raw (&raws)[Shape::kVectors], char* buffers, int number, int64 row, int rank) const {
    typename First::Packed own[Shape::kVectors];
    typename Matrices<Others...>::Packed rest[Shape::kVectors];
    first.template read_covering<Shape>(own, buffer<Shape::kCapacity>(buffers, number), row, rank);
    others.template read_covering<Shape, kBuffers>(rest, buffers_of_others<Shape::kCapacity, kBuffers>(buffers), number,
                                                   row, rank);
#pragma unroll
    for (int p = 0; p < Shape::kVectors; ++p) raws[p] = {own[p], rest[p]};
  }
  template <int kColumns, int kBuffers>
  DEVICE void clear(char* buffers, int number, VectorSlot slot) const {
    first.clear(buffer<kColumns>(buffers, number), slot);
    others.template clear<kColumns, kBuffers>(buffers_of_others<kColumns, kBuffers>(buffers), number, slot);
  }
  template <int kColumns, int kBuffers>
  DEVICE void put(char* buffers, int number, VectorSlot slot, const Packed& packed) const {
    first.put(buffer<kColumns>(buffers, number), slot, packed.first);
    others.template put<kColumns, kBuffers>(buffers_of_others<kColumns, kBuffers>(buffers), number, slot,
                                            packed.others);
  }
  template <int kColumns, int kBuffers>
  DEVICE void read(Raw& raw, char* buffers, int number, VectorSlot slot) const {
    first.read(raw.first, buffer<kColumns>(buffers, number), slot);
    others.template read<kColumns, kBuffers>(raw.others, buffers_of_others<kColumns, kBuffers>(buffers), number, slot);
  }
  DEVICE void stands_at(Raw& raw, int64 row, int64 column) const {
    first.stands_at(raw.first, row, column);
    others.stands_at(raw.others, row, column);
  }

 private:
  template <int kColumns>
  DEVICE static char* buffer(char* buffers, int number) {
    return buffers + number * First::buffer_bytes(kColumns);
  }
  template <int kColumns, int kBuffers>
  DEVICE static char* buffers_of_others(char* buffers) {
    return buffers + kBuffers * First::buffer_bytes(kColumns);
  }
};

// The rows that are normalised: those of x, or s = prologue(x, ...) rounded to the format S once, so that all who read
// s see the same. A thread keeps s alone.
template <class S, int kVectorSize, class Operation, class Inputs, bool kPrologue = Operation::kPrologue>
struct LoadSource {
  static constexpr bool kVectorized = Inputs::kVectorized;
  using Raw = typename Inputs::Packed;
  using Packed = Vector<S, kVectorSize>;
  Inputs inputs;
  Operation operation;

  DEVICE void fetch(Raw& raw, int64 row, int64 column, int valid) const { inputs.fetch(raw, row, column, valid); }
  template <class Shape>
  using Loading = typename Inputs::template Loading<Shape>;
  template <class Shape>
  DEVICE void start(Loading<Shape>& loading, int64 row, int rank, bool active) const {
    inputs.template start<Shape>(loading, row, rank, active);
  }
  template <class Shape>
  DEVICE void receive(Packed (&vectors)[Shape::kVectors], const Loading<Shape>& loading, int64 row, int rank,
                      bool active) const {
    Raw raws[Shape::kVectors];
    inputs.template receive<Shape>(raws, loading, row, rank, active);
#pragma unroll
    for (int p = 0; p < Shape::kVectors; ++p) vectors[p] = keep(raws[p], active ? Shape::valid(rank, p) : 0);
  }
  DEVICE Packed keep(const Raw& raw, int valid) const {
    if constexpr (!kPrologue) {
      return raw.first;
    } else {
      typename Operation::Compute values[Inputs::kCount][kVectorSize], s[kVectorSize];
      inputs.unpack(raw, values);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) s[i] = i < valid ? operation.prologue(values, i) : 0;
      return pack_values<S>(s);
    }
  }
  template <class Compute>
  DEVICE void unpack(const Packed& packed, Compute (&values)[kVectorSize]) const {
    cunorm::unpack(packed, values);
  }
  DEVICE void keep_packed(Packed& packed) const { cunorm::keep_packed(packed); }
  template <int kColumns, int kBuffers, Fetch kFetch>
  DEVICE void copy(char* buffers, int number, VectorSlot slot, int64 row, int64 column, int valid) const {
    inputs.template copy<kColumns, kBuffers, kFetch>(buffers, number, slot, row, column, valid);
  }
  static constexpr int buffer_bytes(int columns) { return Inputs::buffer_bytes(columns); }
  template <int kColumns, int kBuffers>
  DEVICE void read_covering(Raw& raw, char* buffers, int number, VectorSlot slot, int64 row, int valid) const {
    inputs.template read_covering<kColumns, kBuffers>(raw, buffers, number, slot, row, valid);
  }
  template <class Shape, int kBuffers>
  DEVICE void read_covering(Raw (&raws)[Shape::kVectors], char* buffers, int number, int64 row, int rank) const {
    inputs.template read_covering<Shape, kBuffers>(raws, buffers, number, row, rank);
  }
  template <int kColumns, int kBuffers>
  DEVICE void put(char* buffers, int number, VectorSlot slot, const Raw& raw) const {
    inputs.template put<kColumns, kBuffers>(buffers, number, slot, raw);
  }
  template <int kColumns, int kBuffers>
  DEVICE void clear(char* buffers, int number, VectorSlot slot) const {
    inputs.template clear<kColumns, kBuffers>(buffers, number, slot);
  }
  template <int kColumns, int kBuffers>
  DEVICE void read(Raw& raw, char* buffers, int number, VectorSlot slot) const {
    inputs.template read<kColumns, kBuffers>(raw, buffers, number, slot);
  }
  DEVICE void stands_at(Raw& raw, int64 row, int64 column) const { inputs.stands_at(raw, row, column); }
};

}  // namespace cunorm
