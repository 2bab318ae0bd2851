// Columns in 8 bits, each with its scale (float8.cuh), transposed: bytes[column][row], the rows padded with zeros to
// a multiple of 16. What a product adds up over rows it wants side by side in memory.
#pragma once
#include "rows/float8.cuh"
#include "rows/load.cuh"
#include "norms/statistics.cuh"
#include "rows/store.cuh"

namespace cunorm {

// A tile of kTileRows rows is read in vectors of columns and written in 16 rows of a column at a time. The 8 lanes of a
// warp that are neighbours read 128 bytes of a row, and the four such sets four rows each: a thread makes of 4 rows of
// a column one word, and the words of its warp are 16 rows.
constexpr int kTileRows = 128;
constexpr int kTileWarps = kTileRows / 16;

// One value of a vector.
template <class T, int kVectorSize>
DEVICE float element(const Vector<T, kVectorSize>& vector, int i) {
  if constexpr (sizeof(T) == 4) {
    return word_to_float(vector.words[i]);
  } else {
    return i % 2 ? T::decode_high(vector.words[i / 2]) : T::decode_low(vector.words[i / 2]);
  }
}

// Of a matrix as it is: the largest of a column is known.
template <class Load>
struct PlainColumns {
  static constexpr int kVectorSize = Load::kVectorSize;
  static constexpr int kShared = 0;
  using LoadingVector = typename Load::LoadingVector;
  Load load;
  const float* maxima;  // [column]

  struct Row {};
  template <class To>
  DEVICE float largest(int64 column, To) const {
    return maxima[column];
  }
  DEVICE Row row(int64, bool) const { return {}; }
  template <class Columns>
  DEVICE float value(float value, const Row&, const Columns&, int) const {
    return value;
  }
};

// Of the normalised rows, made once more from x: no |xhat| is beyond `bound`, sqrt(cols - 1) with a mean and sqrt(cols)
// without (of numbers with mean 0 and mean square 1, where one is that large the others share what is left). What the
// epilogue, a line, makes of xhat is largest at an end; roundings keep the order.
template <class Norm, class Load, class Operation, class Affine>
struct NormalisedColumns {
  static constexpr int kVectorSize = Load::kVectorSize;
  static constexpr int kShared = Affine::kCount;
  using LoadingVector = typename Load::LoadingVector;
  Load load;
  Operation operation;
  Affine affine;  // weight and bias, as far as there are any
  const float* mean;
  const float* rstd;
  float bound;

  using Row = typename Norm::template SavedRow<float>;
  // Also hands the weight and bias of the column to to(k, value).
  template <class To>
  DEVICE float largest(int64 column, To to) const {
    float values[kArrays<Affine>][kVectorSize], most = 0;
    typename Affine::Packed vector;
    const int i = static_cast<int>(column % kVectorSize);
    affine.fetch(vector, 0, column - i, i + 1);
    affine.unpack(vector, values);
#pragma unroll
    for (int j = 0; j < kVectorSize; ++j) {
      if (j != i) continue;
#pragma unroll
      for (int k = 0; k < kShared; ++k) to(k, values[k][j]);
      most = larger(magnitude(operation.epilogue(bound, Nothing{}, values, j)),
                    magnitude(operation.epilogue(-bound, Nothing{}, values, j)));
    }
    return most;
  }
  DEVICE Row row(int64 row, bool there) const { return there ? Row::of(mean, rstd, row) : Row{}; }
  template <class Columns>
  DEVICE float value(float x, const Row& row, const Columns& columns, int i) const {
    return operation.epilogue(row.xhat(x), Nothing{}, columns, i);
  }

 private:
  struct Nothing {};
  DEVICE static float magnitude(float value) { return word_to_float(float_to_word(value) & 0x7fffffff); }
};

// A CTA takes `iterations` tiles below each other, of kColumnWarps * 8 vectors of columns. kGiven: one scale for all,
// *scales.
template <class T, class Format, bool kPowerOf2, bool kGiven, int kColumnWarps, class Source>
DEVICE void cast_columns(Source source, uint8* bytes, float* scales, const float* given, int64 rows, int64 cols,
                         int64 padded, int64 iterations) {
  constexpr int kVectorSize = Source::kVectorSize;
  constexpr int kColumns = kColumnWarps * 8 * kVectorSize;
  constexpr int kThreads = kColumnWarps * kTileWarps * 32;
  constexpr int kWords = kTileRows / 4;  // of a column
  alignas(16) __shared__ uint32 tile[kColumns * kWords];
  // What the arithmetic needs of each column: q, then weight and bias. In registers, from tile to tile, they would
  // leave room for fewer threads.
  alignas(16) __shared__ float of_columns[1 + Source::kShared][kColumns];

  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int vector = warp / kTileWarps * 8 + lane % 8;  // of the tile
  const int sixteen = warp % kTileWarps, four = lane / 8;
  const int64 first_column = static_cast<int64>(blockIdx.x) * kColumns;
  const int64 column = first_column + vector * kVectorSize;
  const int64 left = cols - column;
  const int valid = left < 0 ? 0 : left < kVectorSize ? static_cast<int>(left) : kVectorSize;
  int64 first_row = static_cast<int64>(blockIdx.y) * iterations * kTileRows;

  // Nothing looks at a tile whose loads have begun before the one in front of it has been written: with the columns
  // past the last made zeros at once every thread waited for memory there.
  typename Source::LoadingVector loading[4];
  typename Source::Row of_rows[4];
  const auto fetch = [&](int64 from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64 row = from + sixteen * 16 + four * 4 + i;
      const bool there = row < rows;
      source.load.start(loading[i], row, column, there ? valid : 0);
      of_rows[i] = source.row(row, there);
    }
  };
  fetch(first_row);
  for (int own = threadIdx.x; own < kColumns; own += kThreads) {
    const int64 of = first_column + own;
    float multiplier = 0;
    if constexpr (kGiven) {
      multiplier = 1 / *given;
    } else if (of < cols) {
      const auto keep = [&](int k, float value) { of_columns[1 + k][own] = value; };
      const Scale scale = Scale::of<Format, kPowerOf2>(source.largest(of, keep));
      multiplier = scale.multiplier;
      if (blockIdx.y == 0) scales[of] = scale.scale;
    }
    of_columns[0][own] = multiplier;
  }

  for (int left_iterations = static_cast<int>(iterations); left_iterations > 0 && first_row < padded;
       --left_iterations) {
    __syncthreads();  // columns are known, and the tile before has been read
    int there = 0;
    Vector<T, kVectorSize> vectors[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64 row = first_row + sixteen * 16 + four * 4 + i;
      there += row < rows;
      source.load.receive(vectors[i], loading[i], row);
    }
    // Rows past the end are zeros whatever their scale is.
    const uint32 mask = there == 4 ? ~0u : (1u << 8 * there) - 1;
    // Two columns after the other: what all eight need at once would take 18 registers more.
#pragma unroll
    for (int start = 0; start < kVectorSize; start += 2) {
      float columns[1 + Source::kShared][2];
#pragma unroll
      for (int k = 0; k < 1 + Source::kShared; ++k) {
        Vector<float, 2> values;
        load_shared_words(&of_columns[k][vector * kVectorSize + start], values.words);
        unpack(values, columns[k]);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          values[i] = source.value(element(vectors[i], start + j), of_rows[i], columns + 1, j) * columns[0][j];
        }
        const uint32 low = Format::encode_pair(values[0], values[1]), high = Format::encode_pair(values[2], values[3]);
        // 16 rows of a column lie together; which of the column's places they have, its vector says: neighbouring
        // lanes meet no bank conflicts.
        uint32* const place = tile + (vector * kVectorSize + start + j) * kWords + (sixteen ^ (vector % 8)) * 4 + four;
        store_shared_words(place, {(low | high << 16) & mask});
      }
    }
    if (left_iterations > 1) fetch(first_row + kTileRows);
    __syncthreads();
    for (int own = threadIdx.x; own < kColumns * kTileWarps; own += kThreads) {
      const int of = own / kTileWarps, part = own % kTileWarps;
      const int64 to_column = first_column + of, to_row = first_row + part * 16;
      uint32 words[4];
      load_shared_words(tile + of * kWords + (part ^ (of / kVectorSize % 8)) * 4, words);
      if (to_column < cols && to_row < padded)
        store_words<Cache::kStreamed>(bytes + to_column * padded + to_row, words);
    }
    first_row += kTileRows;
  }
}

}  // namespace cunorm
