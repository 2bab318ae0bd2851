// Vectors in global memory: read and written wherever their rows begin.
#pragma once
#include "rows/vector.cuh"

namespace cunorm {

template <class T, class Compute>
DEVICE void store_value(T* address, Compute value) {
  if constexpr (sizeof(T) == 2) {
    *address = T{T::encode(before_narrowing(value))};
  } else {
    *address = static_cast<T>(value);
  }
}

// A vector access of an array of vectors moves so many bytes.
template <class T, int kVectorSize>
constexpr int kUnit = kVectorSize * sizeof(T) < 16 ? kVectorSize * sizeof(T) : 16;

// Calls use(offset) where the compiler knows which multiple of kStep the offset is, from kFrom on and below kEnd: what
// depends on it are then constants.
template <int kStep, int kEnd, int kFrom = 0, class Use>
DEVICE void with_known(uint32 offset, const Use& use) {
  if constexpr (kEnd - kFrom <= kStep) {
    use(static_cast<uint32>(kFrom));
  } else {
    constexpr int kMiddle = (kFrom + kEnd) / 2;
    if (offset < kMiddle) {
      with_known<kStep, kMiddle, kFrom>(offset, use);
    } else {
      with_known<kStep, kEnd, kMiddle>(offset, use);
    }
  }
}

// words[i] becomes the word that begins `offset` bytes after it: so many as elements of T take, fewer than 8 * kStep.
// By halves, since registers have no index at run time.
template <class T, int kStep, int kWords>
DEVICE void shift_down(uint32 (&words)[kWords], uint32 offset) {
  if constexpr (kStep > 0 && 4 * kStep >= sizeof(T)) {
#pragma unroll
    for (int i = 0; i + kStep < kWords; ++i) {
      const uint32 near = words[i], far = words[i + kStep];  // a choice between places would be such an index
      words[i] = offset & 4 * kStep ? far : near;
    }
    shift_down<T, kStep / 2>(words, offset);
  } else if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i + 1 < kWords; ++i) words[i] = funnel_shift(words[i], words[i + 1], 8 * offset);
  }
}

// How the vectors of a row are read and written. Columns are owned by the same thread wherever the row lies, so that
// its result does not depend on it. kAnywhere: vectors begin at any address, and neighbouring lanes read the aligned
// words that their vectors share, and shift them alike. kAligned: at multiples of their size. kWhole: besides, all
// columns of a vector are valid or none. A compiler that need not find that out for every access is done in 0.85 of the
// time.
enum class Access { kAnywhere, kAligned, kWhole };

// The words that hold a vector: where it begins anywhere, one access more.
template <class T, int kVectorSize, Access kAccess>
struct Covering {
  uint32 words[Vector<T, kVectorSize>::kWords + (kAccess == Access::kAnywhere ? kUnit<T, kVectorSize> / 4 : 0)];
};

template <Cache kCache, class T, int kVectorSize, Access kAccess>
DEVICE void load_covering(Covering<T, kVectorSize, kAccess>& covering, const T* row, int64 column, int valid) {
  constexpr int kSize = sizeof(T);
  constexpr bool kAligned = kAccess != Access::kAnywhere;
  if constexpr (kAccess == Access::kWhole) {
    load_words<kCache>(begin_of_row(row) + column, covering.words, valid > 0);
  } else {
    // Shared words through L1, which has them when the second lane asks.
    load_covering_words<kAligned ? kCache : Cache::kKept, kUnit<T, kVectorSize>, kAligned>(
        row, column * kSize, valid * kSize, covering.words);
  }
}

// The first of the words as a vector of which the first `valid` columns count; the others become zero.
template <Access kAccess, class T, int kVectorSize, int kWords>
DEVICE void keep_valid(Vector<T, kVectorSize>& vector, const uint32 (&words)[kWords], int valid) {
  constexpr bool kWhole = kAccess == Access::kWhole;
#pragma unroll
  for (int i = 0; i < Vector<T, kVectorSize>::kWords; ++i) {
    constexpr int kSize = sizeof(T);
    vector.words[i] = kWhole || 4 * i < valid * kSize ? words[i] : 0;
    if (!kWhole && kSize == 2 && 2 * i + 1 == valid) vector.words[i] &= 0xffff;
  }
}

// Reads the vector at `column` of a row, its first `valid` columns, one by one; the others become zero.
template <class T, int kVectorSize>
DEVICE void load_elements(Vector<T, kVectorSize>& vector, const T* row, int64 column, int valid) {
  constexpr int kHalves = sizeof(T) == 2 ? 2 : 1, kWords = sizeof(T) == 8 ? 2 : 1;  // elements of a word, words of one
#pragma unroll
  for (int i = 0; i < kVectorSize; i += kHalves) {
    if constexpr (sizeof(T) == 2) {
      const auto* const bits = reinterpret_cast<const unsigned short*>(row + column) + i;
      const uint32 low = i < valid ? bits[0] : 0, high = i + 1 < valid ? bits[1] : 0;
      vector.words[i / 2] = low | high << 16;
    } else {
      uint32 element[kWords];
      load_words<Cache::kKept>(row + column + i, element, i < valid);
#pragma unroll
      for (int word = 0; word < kWords; ++word) vector.words[kWords * i + word] = element[word];
    }
  }
}

// Reads the vector at `column` of a row, its first `valid` columns; the others become zero.
template <Access kAccess, Cache kCache, class T, int kVectorSize>
DEVICE void load_vector(Vector<T, kVectorSize>& vector, const T* row, int64 column, int valid) {
  constexpr int kBytes = kUnit<T, kVectorSize>, kSize = sizeof(T);
  if constexpr (kAccess == Access::kAnywhere && kSize == 8) {
    // They are read two words at a time. Shifted, a weight of float64 spilled 8 to 36 bytes.
    load_elements(vector, row, column, valid);
  } else {
    Covering<T, kVectorSize, kAccess> covering;
    load_covering<kCache>(covering, row, column, valid);
    if constexpr (kAccess == Access::kAnywhere) {
      shift_down<T, kBytes / 8>(covering.words, past_multiple_of<kBytes>(row));
    }
    keep_valid<kAccess>(vector, covering.words, valid > 0 ? valid : kVectorSize);
  }
}

// All vectors that a thread has of a row: first the loads of all matrices are started, then the words of each are
// shifted, by an offset that the compiler knows.
template <class Shape, Cache kCache, class T, int kVectorSize, Access kAccess>
DEVICE void start_loads(Covering<T, kVectorSize, kAccess> (&vectors)[Shape::kVectors], const T* row, int rank,
                        bool active) {
#pragma unroll
  for (int p = 0; p < Shape::kVectors; ++p) {
    load_covering<kCache>(vectors[p], row, Shape::column(rank, p), active ? Shape::valid(rank, p) : 0);
  }
}
template <class Shape, class T, int kVectorSize, Access kAccess>
DEVICE void receive_vectors(Vector<T, kVectorSize> (&vectors)[Shape::kVectors],
                            const Covering<T, kVectorSize, kAccess> (&loading)[Shape::kVectors], const T* row, int rank,
                            bool active) {
  constexpr int kBytes = kUnit<T, kVectorSize>;
  const auto receive = [&](uint32 offset) {
#pragma unroll
    for (int p = 0; p < Shape::kVectors; ++p) {
      Covering<T, kVectorSize, kAccess> covering = loading[p];
      const int valid = active ? Shape::valid(rank, p) : 0;
      if constexpr (kAccess == Access::kAnywhere) shift_down<T, kBytes / 8>(covering.words, offset);
      keep_valid<kAccess>(vectors[p], covering.words, valid > 0 ? valid : kVectorSize);
    }
  };
  if constexpr (kAccess == Access::kAnywhere) {
    with_known<sizeof(T), kBytes>(past_multiple_of<kBytes>(row), receive);
  } else {
    receive(0);
  }
}

template <class T, int kVectorSize>
DEVICE void store_element(T* address, const Vector<T, kVectorSize>& vector, int i) {
  if constexpr (sizeof(T) == 8) {
    address[i] = words_to_double(vector.words[2 * i], vector.words[2 * i + 1]);
  } else if constexpr (sizeof(T) == 4) {
    address[i] = word_to_float(vector.words[i]);
  } else if constexpr (sizeof(T) == 1) {
    address[i] = T{static_cast<uint8>(vector.words[i / 4] >> (i % 4 * 8))};
  } else {
    address[i] = T{static_cast<uint16>(vector.words[i / 2] >> (i % 2 * 16))};
  }
}

template <Access kAccess, Cache kCache, class T, int kVectorSize>
DEVICE void store_vector(T* address, const Vector<T, kVectorSize>& vector, int valid) {
  if (kAccess != Access::kAnywhere && valid >= kVectorSize) {
    store_words<kCache>(address, vector.words);
    return;
  }
  if constexpr (kAccess != Access::kWhole) {
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      if (i < valid) store_element(address, vector, i);
    }
  }
}

// `size` bytes that begin `begin` bytes after the first of the words, stored `begin` bytes after `from`: a multiple of
// their size.
template <class T, int kSize, Cache kCache, int kWords>
DEVICE void store_part(char* from, const uint32 (&words)[kWords], uint32 begin) {
  if constexpr (kSize == 2) {
    *reinterpret_cast<unsigned short*>(from + begin) = static_cast<unsigned short>(words[begin / 4] >> begin % 4 * 8);
  } else {
    uint32 part[kSize / 4];
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      part[i] = words[begin / 4 + i];
      if (sizeof(T) == 2) part[i] = funnel_shift(part[i], words[begin / 4 + i + 1], 8 * begin);
    }
    store_words<kCache>(from + begin, part);
  }
}

// The bytes of the words from `begin` on and below `end`, in as few parts as their sizes allow that are powers of two:
// up to an aligned end the smallest first, from an aligned begin the largest.
template <class T, bool kToAlignedEnd, Cache kCache, int kSize, int kWords>
DEVICE void store_parts(char* from, const uint32 (&words)[kWords], uint32 begin, uint32 end) {
  if constexpr (kSize >= static_cast<int>(sizeof(T)) && kSize <= 4 * kWords) {
    const bool needed = (end - begin) & kSize;
    if (needed) store_part<T, kSize, kCache>(from, words, begin);
    store_parts<T, kToAlignedEnd, kCache, kToAlignedEnd ? 2 * kSize : kSize / 2>(from, words,
                                                                                 needed ? begin + kSize : begin, end);
  }
}

// The same where vectors do not begin at a multiple of their size; those of kLanes neighbouring threads follow each
// other in memory. A lane writes the aligned words that begin in its vector, of which the last ends in the next lane's,
// and at the ends of the lanes' run smaller parts. All lanes of the warp come here together.
template <int kLanes, Cache kCache, class T, int kVectorSize>
DEVICE void store_run(T* row, int64 column, const Vector<T, kVectorSize>& vector, int valid) {
  constexpr int kBytes = kUnit<T, kVectorSize>, kWords = Vector<T, kVectorSize>::kWords;
  uint32 words[kWords + kBytes / 4];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = vector.words[i];
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) words[kWords + i] = shuffle_down(vector.words[i]);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const bool ends = shuffle_down(valid) < kVectorSize || lane == kLanes - 1;
  if (valid < kVectorSize) {
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      if (i < valid) store_element(row + column, vector, i);
    }
    return;
  }
  char* const from = reinterpret_cast<char*>(begin_of_row(row) + column);
  const uint32 before_word = (kBytes - past_multiple_of<kBytes>(row)) % kBytes;
  with_known<sizeof(T), kBytes>(before_word, [&](uint32 head) {
    if (head == 0 || !ends) {
      uint32 shifted[kWords + kBytes / 4];
#pragma unroll
      for (int i = 0; i < kWords + kBytes / 4; ++i) shifted[i] = words[i];
      shift_down<T, kBytes / 8>(shifted, head);
      uint32 whole[kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i) whole[i] = shifted[i];
      store_words<kCache>(from + head, whole);
    } else {
      store_parts<T, false, kCache, kVectorSize* static_cast<int>(sizeof(T)) / 2>(from, words, head, 4 * kWords);
    }
    if (lane == 0) store_parts<T, true, kCache, static_cast<int>(sizeof(T))>(from, words, 0, head);
  });
}

}  // namespace cunorm
