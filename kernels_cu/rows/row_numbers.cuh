// A number for each row: of an operand such as a factor for each token, and the gradient of one.
#pragma once
#include "rows/vector_access.cuh"
#include "rows/row.cuh"
#include "rows/row_starts.cuh"

namespace cunorm {

// A matrix whose rows are such numbers, as lists of matrices have it (load.cuh). A number takes no shared memory:
// when its row is prefetched it is on its way to L1, where it is read with the row.
template <class T, int kVectorSize_, bool kTwoStrides>
struct RowNumbers {
  static constexpr int kVectorSize = kVectorSize_;
  static constexpr int kColumnBytes = 0;
  static constexpr bool kVectorized = true;
  using Packed = Vector<T, 1>;
  const T* data;
  RowStarts<kTwoStrides> starts;
  int64 rows;

  // Beside rows of the same warp there may be one past the end, which counts as zero.
  DEVICE void load(Packed& number, int64 row) const {
    number = {};
    if (row < rows) load_elements(number, data + starts.of(row), 0, 1);
  }
  DEVICE void fetch(Packed& number, int64 row, int64, int) const { load(number, row); }
  template <class Compute>
  DEVICE void unpack(const Packed& number, Compute (&values)[kVectorSize]) const {
    Compute value[1];
    cunorm::unpack(number, value);
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) values[i] = value[0];
  }
  DEVICE void keep_packed(Packed&) const {}

  template <class Shape>
  using Loading = Packed;
  template <class Shape>
  DEVICE void start(Loading<Shape>& loading, int64 row, int, bool) const {
    load(loading, row);
  }
  template <class Shape>
  DEVICE void receive(Packed (&vectors)[Shape::kVectors], const Loading<Shape>& loading, int64, int, bool) const {
#pragma unroll
    for (int p = 0; p < Shape::kVectors; ++p) vectors[p] = loading;
  }
  static constexpr int buffer_bytes(int) { return 0; }
  template <Fetch kFetch>
  DEVICE void copy(char*, VectorSlot slot, int64 row, int64, int) const {
    if (slot.thread % 32 == 0 && slot.run == 0) prefetch(data + starts.of(row));
  }
  DEVICE void read_covering(Packed&, const char*, VectorSlot, int64, int) const {}
  template <class Shape>
  DEVICE void read_covering(Packed (&vectors)[Shape::kVectors], const char*, int64 row, int) const {
    Packed number;
    load(number, row);
#pragma unroll
    for (int p = 0; p < Shape::kVectors; ++p) vectors[p] = number;
  }
  DEVICE void clear(char*, VectorSlot) const {}
  DEVICE void put(char*, VectorSlot, const Packed&) const {}
  DEVICE void read(Packed&, const char*, VectorSlot) const {}
  DEVICE void stands_at(Packed& number, int64 row, int64) const { load(number, row); }
};

// Where the gradients of such numbers go, which are sums over a row.
template <class... Ts>
struct RowSums;

template <>
struct RowSums<> {
  static constexpr int kCount = 0;
  template <class Compute>
  DEVICE void store(int64, const Compute*) const {}
};

template <class First, class... Others>
struct RowSums<First, Others...> {
  static constexpr int kCount = 1 + sizeof...(Others);
  First* first;
  RowSums<Others...> others;

  template <class Compute>
  DEVICE void store(int64 row, const Compute* sums) const {
    store_value(first + row, sums[0]);
    others.store(row, sums + 1);
  }
};

// What a thread has added up of such gradients of its row. Their terms come behind the values of Results.
template <class Shape, int kRows, class Results, class RowSums, class Compute>
struct TotalsOfRow {
  static constexpr int kFirst = Results::kCount;
  static constexpr int kCount = RowSums::kCount > 0 ? RowSums::kCount : 1;
  static constexpr int kArrays = RowSums::kCount > 0 ? kFirst + kCount : cunorm::kArrays<Results>;
  static constexpr bool kExchanges = RowSums::kCount > 0 && Shape::kSlots > 1;
  using Exchange = RowExchange<Shape, kRows, kCount, Compute>;
  Compute totals[kCount] = {};

  DEVICE void add(const Compute (&values)[kArrays][Shape::kVectorSize], int valid) {
    if constexpr (RowSums::kCount > 0) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        Compute terms[Shape::kVectorSize];
#pragma unroll
        for (int i = 0; i < Shape::kVectorSize; ++i) terms[i] = i < valid ? values[kFirst + k][i] : 0;
        totals[k] += sum(terms);
      }
    }
  }
  // All threads of the row bring what they have, to be stored where a warp holds the row (`there`: it is one), else to
  // be collected.
  DEVICE void bring(RowSums to, Exchange& exchange, int iteration, int rank, int64 row, bool there) {
    if constexpr (RowSums::kCount > 0) {
#pragma unroll
      for (Compute& total : totals) total = group_sum<Shape::kLanes>(total);
      if constexpr (kExchanges) {
        exchange.publish(iteration, rank, totals);
      } else if (there && threadIdx.x % Shape::kThreads == 0) {
        to.store(row, totals);
      }
    }
  }
  // Stores what was brought for the row of that iteration: kMet, at a barrier since. All threads of a row call this
  // before they bring the next.
  template <bool kMet>
  DEVICE static void collect(RowSums to, Exchange& exchange, int iteration, int rank, int64 row) {
    if constexpr (kExchanges) {
      const auto& slots = kMet ? exchange.collected(iteration) : exchange.collect(iteration);
      Compute found[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) found[k] = Exchange::sum([&](int slot) { return slots(k, slot); });
      if (rank == 0 && threadIdx.x % Shape::kThreads == 0) to.store(row, found);
    }
  }
};

}  // namespace cunorm
