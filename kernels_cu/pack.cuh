// A pack: the neighbouring columns that one thread reads at once (16 bytes of x). Packs stay in registers in their
// storage format and become float (double for float64) only where arithmetic needs them, so a row of 8192 bfloat16
// takes half the registers that its float values would.
#pragma once
#include "platform.cuh"

namespace cunorm {

// The element type of an array that was not given: it occupies no registers and nothing is loaded.
struct Absent {};

template <class T>
constexpr bool kPresent = true;
template <>
constexpr bool kPresent<Absent> = false;

template <class T, int kPack>
struct Pack {
  static constexpr int kWords = kPack * sizeof(T) / 4;
  static_assert(kPack * sizeof(T) % 4 == 0);
  uint32 words[kWords];
};
template <int kPack>
struct Pack<Absent, kPack> {};

template <class Compute, class T, int kPack>
DEVICE void unpack(const Pack<T, kPack>& pack, Compute (&values)[kPack]) {
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    if constexpr (sizeof(T) == 8) {
      values[i] = static_cast<Compute>(words_to_double(pack.words[2 * i], pack.words[2 * i + 1]));
    } else if constexpr (sizeof(T) == 4) {
      values[i] = word_to_float(pack.words[i]);
    } else {
      values[i] = i % 2 ? T::decode_high(pack.words[i / 2]) : T::decode_low(pack.words[i / 2]);
    }
  }
}

// Between two uses of a pack: without it the compiler keeps the unpacked values instead, twice the registers.
template <class T, int kPack>
DEVICE void stay_packed(Pack<T, kPack>& pack) {
  if constexpr (kPresent<T>) {
#pragma unroll
    for (int i = 0; i < Pack<T, kPack>::kWords; ++i) forget(pack.words[i]);
  }
}

// Σ over a pack, as a tree: in a chain of additions of like numbers every rounding may go the same way.
template <class Compute, int kPack>
DEVICE Compute sum(const Compute (&values)[kPack]) {
  Compute sums[kPack];
#pragma unroll
  for (int i = 0; i < kPack; ++i) sums[i] = values[i];
#pragma unroll
  for (int step = 1; step < kPack; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kPack; i += 2 * step) sums[i] += sums[i + step];
  }
  return sums[0];
}

// Σ a * b over a pack, likewise.
template <class Compute, int kPack>
DEVICE Compute dot(const Compute (&a)[kPack], const Compute (&b)[kPack]) {
  Compute sums[kPack / 2];
#pragma unroll
  for (int i = 0; i < kPack / 2; ++i) sums[i] = multiply_add(a[2 * i], b[2 * i], a[2 * i + 1] * b[2 * i + 1]);
#pragma unroll
  for (int step = 1; step < kPack / 2; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kPack / 2; i += 2 * step) sums[i] += sums[i + step];
  }
  return sums[0];
}

// The one rounding: Compute to the storage format, to nearest even.
template <class T, class Compute, int kPack>
DEVICE Pack<T, kPack> pack_values(const Compute (&values)[kPack]) {
  Pack<T, kPack> pack;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    if constexpr (sizeof(T) == 8) {
      double_to_words(values[i], pack.words[2 * i], pack.words[2 * i + 1]);
    } else if constexpr (sizeof(T) == 4) {
      pack.words[i] = float_to_word(static_cast<float>(values[i]));
    } else if (i % 2) {
      pack.words[i / 2] = T::encode_word(before_narrowing(values[i - 1]), before_narrowing(values[i]));
    }
  }
  return pack;
}

// A value as the storage format has it.
template <class T, class Compute>
DEVICE Compute rounded(Compute value) {
  if constexpr (sizeof(T) == 2) {
    return T::decode_low(T::encode(before_narrowing(value)));
  } else {
    return static_cast<T>(value);
  }
}

template <class T, class Compute>
DEVICE void store_value(T* address, Compute value) {
  if constexpr (sizeof(T) == 2) {
    *address = T{T::encode(before_narrowing(value))};
  } else {
    *address = static_cast<T>(value);
  }
}

// Reads the first `valid` columns of a pack; the others become zero. Columns are owned by the same thread whether the
// address allows a vector load (kAligned) or not: a row's result does not depend on where the row lies.
template <bool kAligned, Cache kCache, class T, int kPack>
DEVICE void load_pack(Pack<T, kPack>& pack, const T* address, int valid) {
  if constexpr (kAligned) {
    load_words<kCache>(address, pack.words, valid >= kPack);
    if (valid <= 0 || valid >= kPack) return;
  }
#pragma unroll
  for (int i = 0; i < Pack<T, kPack>::kWords; ++i) pack.words[i] = 0;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    if (i >= valid) continue;
    if constexpr (sizeof(T) == 8) {
      double_to_words(address[i], pack.words[2 * i], pack.words[2 * i + 1]);
    } else if constexpr (sizeof(T) == 4) {
      pack.words[i] = float_to_word(address[i]);
    } else {
      pack.words[i / 2] |= static_cast<uint32>(address[i].bits) << (i % 2 * 16);
    }
  }
}

// How kColumns columns of packs lie in shared memory: a pack of more than 16 bytes in pieces, the first pieces of all
// packs side by side, then the second, so that neighbouring threads meet no bank conflicts.
template <class T, int kPack, int kColumns>
struct SharedPacks {
  static constexpr int kPiece = kPack * sizeof(T) < 16 ? kPack * sizeof(T) : 16;
  static constexpr int kPieces = kPack * sizeof(T) / kPiece;
  static constexpr int kStride = kColumns / kPack * kPiece;
  static constexpr int kWords = kPiece / 4;

  DEVICE static char* piece(char* place, int column, int i) { return place + column / kPack * kPiece + i * kStride; }

  // Copies the first `valid` columns, asynchronously where the pack is whole; the others become zero.
  template <bool kAligned, bool kNeighbours>
  DEVICE static void copy(char* place, int column, const T* from, int valid) {
    if (kAligned && valid >= kPack) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        copy_async<kPiece, kNeighbours>(piece(place, column, i), reinterpret_cast<const char*>(from) + i * kPiece);
    } else if (valid > 0) {
      Pack<T, kPack> pack;
      load_pack<false, Cache::kStreamed>(pack, from, valid);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        uint32 words[kWords];
#pragma unroll
        for (int word = 0; word < kWords; ++word) words[word] = pack.words[i * kWords + word];
        store_shared_words(piece(place, column, i), words);
      }
    }
  }

  // What a pack that is never copied reads as.
  DEVICE static void clear(char* place, int column) {
    const uint32 zeros[kWords] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) store_shared_words(piece(place, column, i), zeros);
  }

  DEVICE static void read(Pack<T, kPack>& pack, char* place, int column) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint32 words[kWords];
      load_shared_words(piece(place, column, i), words);
#pragma unroll
      for (int word = 0; word < kWords; ++word) pack.words[i * kWords + word] = words[word];
    }
  }
};

template <bool kAligned, Cache kCache, class T, int kPack>
DEVICE void store_pack(T* address, const Pack<T, kPack>& pack, int valid) {
  if (kAligned && valid >= kPack) {
    store_words<kCache>(address, pack.words);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    if (i >= valid) continue;
    if constexpr (sizeof(T) == 8) {
      address[i] = words_to_double(pack.words[2 * i], pack.words[2 * i + 1]);
    } else if constexpr (sizeof(T) == 4) {
      address[i] = word_to_float(pack.words[i]);
    } else {
      address[i] = T{static_cast<uint16>(pack.words[i / 2] >> (i % 2 * 16))};
    }
  }
}

}  // namespace cunorm
