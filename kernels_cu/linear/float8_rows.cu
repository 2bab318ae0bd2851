// Rows in 8 bits, each with its scale (float8.cuh), and beside them what the same read can tell of the columns:
//   sums[column] = Σ_rows a,  maxima[column] = max_rows |a|
// which are the gradient of a bias and what float8_columns.cu makes scales of. One persistent kernel like that of
// norm_backward.cu: a CTA (or cluster) takes every gridDim-th row, has its next rows under way meanwhile, and keeps the
// sums and maxima of its columns in registers. Each writes one partial row of either; they meet in a fixed order.
#pragma once
#include "rows/float8.cuh"
#include "rows/load.cuh"
#include "rows/rows.cuh"
#include "rows/store.cuh"

namespace cunorm {

// |value| of a vector in its storage format, compared as integers: NaN is the largest, and no decoding is needed.
template <class T, int kVectorSize>
struct Magnitudes {
  static constexpr int kWords = Vector<T, kVectorSize>::kWords;
  static constexpr uint32 kSigns = sizeof(T) == 2 ? 0x80008000 : 0x80000000;
  uint32 words[kWords] = {};

  DEVICE static uint32 larger(uint32 a, uint32 b) {
    if constexpr (sizeof(T) == 2) return larger_halves(a, b);
    return a > b ? a : b;
  }
  DEVICE void add(const Vector<T, kVectorSize>& vector) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = larger(words[i], vector.words[i] & ~kSigns);
  }
  // The largest of the vector.
  DEVICE float largest() const {
    uint32 found = words[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) found = larger(found, words[i]);
    if constexpr (sizeof(T) == 2) {
      return cunorm::larger(T::decode_low(found), T::decode_high(found));
    } else {
      return word_to_float(found);
    }
  }
};

// Where the partial rows of sums (float) and of maxima (as a has them) lie, whole vectors each; and who has any.
template <class T, int kVectorSize, bool kSums_, bool kMaxima_>
struct Partials {
  static constexpr bool kSums = kSums_;
  static constexpr bool kMaxima = kMaxima_;
  float* sums;
  T* maxima;
  int64 width;

  DEVICE void store(int64 group, int64 column, const float (&of_vector)[kVectorSize],
                    const Magnitudes<T, kVectorSize>& most) const {
    if constexpr (kSums)
      store_vector<Access::kWhole, Cache::kKept>(sums + group * width + column, pack_values<float>(of_vector),
                                                 kVectorSize);
    if constexpr (kMaxima) store_words<Cache::kKept>(maxima + group * width + column, most.words);
  }
};

// The sums and maxima of a thread's columns, vectors of a row of Shape or one vector of any.
template <class T, int kVectorSize, int kVectors, class To>
struct ColumnTotals {
  float sums[kVectors][kVectorSize] = {};
  Magnitudes<T, kVectorSize> maxima[kVectors];

  DEVICE void add(int p, const Vector<T, kVectorSize>& vector) {
    if constexpr (To::kSums) {
      float values[kVectorSize];
      unpack(vector, values);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) sums[p][i] += values[i];
    }
    if constexpr (To::kMaxima) maxima[p].add(vector);
  }
};

// Brings together what the kRows row groups of a CTA hold of the same columns, through the memory in which rows waited,
// and stores it as the partial row of this CTA.
template <class Shape, int kRows, class Totals, class To>
DEVICE void store_totals(Totals& totals, int rank, int group, const To& to) {
  constexpr int kVectorSize = Shape::kVectorSize;
  constexpr int kVectors = Shape::kVectors;
  using Words = decltype(totals.maxima[0].words);
  constexpr int kWords = sizeof(Words) / sizeof(uint32);
  if constexpr (kRows > 1) {
    const int row_group = static_cast<int>(threadIdx.x) / Shape::kThreads;
    char* const mine = dynamic_shared() + row_group * Shape::kCapacity * sizeof(float);
    // Sums first, then maxima, in the same memory.
    if constexpr (To::kSums) {
      __syncthreads();
#pragma unroll
      for (int p = 0; p < kVectors; ++p)
        store_shared_words(mine + Shape::local_column(p) * sizeof(float), pack_values<float>(totals.sums[p]).words);
      __syncthreads();
      if (row_group == 0) {
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
          for (int other = 1; other < kRows; ++other) {
            Vector<float, kVectorSize> vector;
            float values[kVectorSize];
            load_shared_words(dynamic_shared() + (other * Shape::kCapacity + Shape::local_column(p)) * sizeof(float),
                              vector.words);
            unpack(vector, values);
#pragma unroll
            for (int i = 0; i < kVectorSize; ++i) totals.sums[p][i] += values[i];
          }
        }
      }
    }
    if constexpr (To::kMaxima) {
      __syncthreads();
#pragma unroll
      for (int p = 0; p < kVectors; ++p)
        store_shared_words(mine + Shape::local_column(p) / kVectorSize * sizeof(Words), totals.maxima[p].words);
      __syncthreads();
      if (row_group == 0) {
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
          for (int other = 1; other < kRows; ++other) {
            uint32 words[kWords];
            load_shared_words(dynamic_shared() + other * Shape::kCapacity * sizeof(float) +
                                  Shape::local_column(p) / kVectorSize * sizeof(Words),
                              words);
#pragma unroll
            for (int i = 0; i < kWords; ++i)
              totals.maxima[p].words[i] = totals.maxima[p].larger(totals.maxima[p].words[i], words[i]);
          }
        }
      }
    }
    if (row_group > 0) return;
  }
#pragma unroll
  for (int p = 0; p < kVectors; ++p) {
    if (Shape::valid(rank, p) > 0) to.store(group, Shape::column(rank, p), totals.sums[p], totals.maxima[p]);
  }
}

// One scale for all that is known, or a scale a row that is found.
template <bool kGiven, bool kPowerOf2, class Format>
struct RowScales {
  static constexpr bool kFinds = !kGiven;
  const float* given;
  float* found;  // [row]

  // q of a row; the thread that is `first` writes its scale.
  DEVICE float multiplier(int64 row, float largest, bool first) const {
    if constexpr (kGiven) {
      return 1 / *given;
    } else {
      const Scale scale = Scale::of<Format, kPowerOf2>(largest);
      if (first) found[row] = scale.scale;
      return scale.multiplier;
    }
  }
};

template <class T, class Shape, int kRows, template <class> class Rows, class Scales, class Load, class Bytes, class To>
DEVICE void cast_rows(Load load, Bytes bytes, Scales scales, To to, int64 rows) {
  constexpr int kVectorSize = Shape::kVectorSize;
  constexpr int kVectors = Shape::kVectors;
  static_assert(Shape::kThreads >= 32);
  using RowsIn = Rows<Matrices<Load>>;
  using Exchange = RowExchange<Shape, kRows, 1, float>;
  constexpr bool kExchanges = Scales::kFinds && Shape::kSlots > 1;
  __shared__ Exchange exchanges[kRows];
  const int row_group = static_cast<int>(threadIdx.x) / Shape::kThreads;
  Exchange& exchange = exchanges[row_group];
  const int rank = Shape::kCluster > 1 ? cluster_rank() : 0;
  const int group = blockIdx.x / Shape::kCluster;
  const int64 row_step = static_cast<int64>(gridDim.x / Shape::kCluster) * kRows;
  const bool first = rank == 0 && threadIdx.x % Shape::kThreads == 0;

  int64 row = static_cast<int64>(group) * kRows + row_group;
  RowsIn rows_in({load, {}}, rank, rows, 0);
#pragma unroll
  for (int ahead = 0; ahead < RowsIn::kAhead; ++ahead) {
    rows_in.prefetch(row + ahead * row_step, ahead);
    RowsIn::sent();
  }
  if constexpr (kExchanges) exchange.start();

  ColumnTotals<T, kVectorSize, kVectors, To> totals;
  for (int iteration = 0; row < rows; row += row_step, ++iteration) {
    RowsIn::arrived();
    rows_in.take(row);
    rows_in.prefetch(row + RowsIn::kAhead * row_step, RowsIn::kAhead - 1);
    RowsIn::sent();

    typename Matrices<Load>::Packed vectors[kVectors];
    Magnitudes<T, kVectorSize> of_row;
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      rows_in.read(vectors[p], p);
      if constexpr (Scales::kFinds) of_row.add(vectors[p].first);
    }
    float largest[1] = {0};
    if constexpr (Scales::kFinds) largest[0] = group_largest<32>(of_row.largest());
    if constexpr (kExchanges) exchange.publish(iteration, rank, largest);
    // While other warps find theirs.
#pragma unroll
    for (int p = 0; p < kVectors; ++p) totals.add(p, vectors[p].first);
    if constexpr (kExchanges) {
      largest[0] = largest_of_slots<Exchange>(exchange.collect(iteration));
    }
    const float multiplier = scales.multiplier(row, largest[0], first);
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      float values[kVectorSize];
      unpack(vectors[p].first, values);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) values[i] *= multiplier;
      bytes.store(row, Shape::column(rank, p), Shape::valid(rank, p), values);
    }
  }
  next_kernel_may_begin();
  if constexpr (To::kSums || To::kMaxima) store_totals<Shape, kRows>(totals, rank, group, to);
}

// Rows too long to hold are read twice: a CTA has one at a time.
template <class T, int kVectorSize, int kThreads, class Scales, class Load, class Bytes>
DEVICE void cast_rows_streamed(Load load, Bytes bytes, Scales scales, int64 rows, int64 cols) {
  __shared__ float of_warps[kThreads / 32];
  const auto valid = [&](int64 column) {
    const int64 left = cols - column;
    return left < kVectorSize ? static_cast<int>(left) : kVectorSize;
  };
  for (int64 row = blockIdx.x; row < rows; row += gridDim.x) {
    Magnitudes<T, kVectorSize> of_row;
    float largest = 0;
    if constexpr (Scales::kFinds) {
#pragma unroll 4
      for (int64 column = threadIdx.x * kVectorSize; column < cols; column += kThreads * kVectorSize) {
        Vector<T, kVectorSize> vector;
        load.fetch(vector, row, column, valid(column));
        of_row.add(vector);
      }
      largest = group_largest<32>(of_row.largest());
      __syncthreads();  // the row before has been read
      if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
      __syncthreads();
      for (const float other : of_warps) largest = larger(largest, other);
    }
    const float multiplier = scales.multiplier(row, largest, threadIdx.x == 0);
#pragma unroll 4
    for (int64 column = threadIdx.x * kVectorSize; column < cols; column += kThreads * kVectorSize) {
      Vector<T, kVectorSize> vector;
      float values[kVectorSize];
      load.fetch(vector, row, column, valid(column));
      unpack(vector, values);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) values[i] *= multiplier;
      bytes.store(row, column, valid(column), values);
    }
  }
}

// Sums and maxima alone, for such rows: a thread owns a vector of columns; blockIdx.y is the group, of gridDim.y.
template <class T, int kVectorSize, int kThreads, class Load, class To>
DEVICE void column_totals(Load load, To to, int64 rows, int64 cols) {
  constexpr int kBatch = 8;
  const int64 column = (static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x) * kVectorSize;
  if (column >= cols) return;
  const int valid = cols - column < kVectorSize ? static_cast<int>(cols - column) : kVectorSize;
  ColumnTotals<T, kVectorSize, 1, To> totals;
  for (int64 first = blockIdx.y; first < rows; first += kBatch * static_cast<int64>(gridDim.y)) {
    Vector<T, kVectorSize> vectors[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64 row = first + b * static_cast<int64>(gridDim.y);
      load.fetch(vectors[b], row < rows ? row : first, column, row < rows ? valid : 0);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      // A row past the end counts as zeros.
      if (first + b * static_cast<int64>(gridDim.y) < rows) totals.add(0, vectors[b]);
    }
  }
  to.store(blockIdx.y, column, totals.sums[0], totals.maxima[0]);
}

// sums[column] and maxima[column] of `groups` partial rows; blockIdx.y says which of the two, where both are wanted.
// The CTA's kSets sets of kLanes threads, four columns each, take every kSets-th partial row.
template <class T, class Sum, int kLanes, int kSets, bool kSums, bool kMaxima>
DEVICE void reduce_columns(const float* sum_partials, const T* maximum_partials, Sum* sums, float* maxima, int64 groups,
                           int64 width, int64 cols) {
  constexpr int kOwn = 4;
  __shared__ float of_sets[kSets][kLanes * kOwn];
  const int lane = static_cast<int>(threadIdx.x) % kLanes, set = static_cast<int>(threadIdx.x) / kLanes;
  const int64 column = (static_cast<int64>(blockIdx.x) * kLanes + lane) * kOwn;
  const bool adds = kSums && (!kMaxima || blockIdx.y == 0);
  float own[kOwn] = {};
  wait_for_kernel_before();
  if (column < width) {
    if (adds) {
#pragma unroll 8
      for (int64 group = set; group < groups; group += kSets) {
        Vector<float, kOwn> vector;
        float values[kOwn];
        load_vector<Access::kWhole, Cache::kStreamed>(vector, sum_partials + group * width, column, kOwn);
        unpack(vector, values);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) own[i] += values[i];
      }
    } else {
#pragma unroll 8
      for (int64 group = set; group < groups; group += kSets) {
        Vector<T, kOwn> vector;
        float values[kOwn];
        load_vector<Access::kWhole, Cache::kStreamed>(vector, maximum_partials + group * width, column, kOwn);
        unpack(vector, values);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) own[i] = larger(own[i], values[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) of_sets[set][lane * kOwn + i] = own[i];
  __syncthreads();
  const int64 mine = static_cast<int64>(blockIdx.x) * kLanes * kOwn + threadIdx.x;
  if (threadIdx.x >= kLanes * kOwn || mine >= cols) return;
  float total = of_sets[0][threadIdx.x];
  for (int other = 1; other < kSets; ++other) {
    const float next = of_sets[other][threadIdx.x];
    total = adds ? total + next : larger(total, next);
  }
  if (adds) {
    store_value(sums + mine, total);
  } else {
    maxima[mine] = total;
  }
}

}  // namespace cunorm
