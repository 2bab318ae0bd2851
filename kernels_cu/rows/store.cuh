// What a kernel writes: lists of matrices. A Store has store(row, column, valid, values), and store_packed of values
// that are packed already.
#pragma once
#include "rows/vector_access.cuh"
#include "rows/row_starts.cuh"

namespace cunorm {

// Where vectors begin anywhere all lanes of a warp store together, or each its elements one by one. So go numbers of 8
// bits, as products take no rows whose number of columns is odd.
template <class T, int kVectorSize_, int kLanes, Access kAccess, Cache kCache, bool kTwoStrides = false,
          bool kByElements = sizeof(T) == 1>
struct StoreRows {
  static constexpr int kVectorSize = kVectorSize_;
  static constexpr bool kScaled = false;
  static constexpr bool kRuns = kAccess == Access::kAnywhere && !kByElements;
  static constexpr bool kTogether = kRuns;
  T* data;
  RowStarts<kTwoStrides> starts;

  template <class Compute>
  DEVICE void store(int64 row, int64 column, int valid, const Compute (&values)[kVectorSize]) const {
    store_packed(row, column, valid, pack_values<T>(values));
  }
  DEVICE void store_packed(int64 row, int64 column, int valid, const Vector<T, kVectorSize>& vector) const {
    T* const to = begin_of_row(data + starts.of(row));
    // float64 beside 16 bits goes by elements: shifted on its way out it spilled 4 bytes.
    if constexpr (!kRuns || kVectorSize * sizeof(T) > 32) {
      store_vector<kAccess, kCache>(to + column, vector, valid);
    } else {
      store_run<kLanes, kCache>(to, column, vector, valid);
    }
  }
};

// Where there is nothing to store.
struct NoStore {
  static constexpr bool kTogether = false;
  template <class Values>
  DEVICE void store(int64, int64, int, const Values&) const {}
  template <class Packed>
  DEVICE void store_packed(int64, int64, int, const Packed&) const {}
};

template <class Store>
constexpr bool kStores = true;
template <>
constexpr bool kStores<NoStore> = false;

// Several matrices that are written together.
template <class... Stores>
struct Results;

template <>
struct Results<> {
  static constexpr int kCount = 0;
  static constexpr bool kTogether = false;
  template <class Values>
  DEVICE void store(int64, int64, int, Values) const {}
};

template <class First, class... Others>
struct Results<First, Others...> {
  static constexpr int kCount = 1 + sizeof...(Others);
  static constexpr bool kTogether = First::kTogether;
  First first;
  Results<Others...> others;

  // values: [matrix][column]
  template <class Compute>
  DEVICE void store(int64 row, int64 column, int valid, const Compute (*values)[First::kVectorSize]) const {
    first.store(row, column, valid, values[0]);
    others.store(row, column, valid, values + 1);
  }
};

}  // namespace cunorm
