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
  static constexpr int kWords = (kPack * sizeof(T) + 3) / 4;
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
    } else if constexpr (sizeof(T) == 1) {
      if (i % 2) {
        const uint32 pair = T::encode_pair(values[i - 1], values[i]);
        pack.words[i / 4] = i % 4 == 1 ? pair : pack.words[i / 4] | pair << 16;
      }
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

// A vector access of an array of packs moves so many bytes.
template <class T, int kPack>
constexpr int kUnit = kPack * sizeof(T) < 16 ? kPack * sizeof(T) : 16;

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

// The words that hold a pack: where it begins elsewhere than at a multiple of its size, one access more.
template <class T, int kPack, bool kAligned>
struct Covering {
  uint32 words[Pack<T, kPack>::kWords + (kAligned ? 0 : kUnit<T, kPack> / 4)];
};

template <bool kAligned, Cache kCache, class T, int kPack>
DEVICE void load_covering(Covering<T, kPack, kAligned>& covering, const T* row, int64 column, int valid) {
  constexpr int kSize = sizeof(T);
  // Shared words through L1, which has them when the second lane asks.
  load_covering_words<kAligned ? kCache : Cache::kKept, kUnit<T, kPack>, kAligned>(row, column * kSize, valid * kSize,
                                                                                   covering.words);
}

// The first of the words as a pack of which the first `valid` columns count; the others become zero.
template <class T, int kPack, int kWords>
DEVICE void keep_valid(Pack<T, kPack>& pack, const uint32 (&words)[kWords], int valid) {
#pragma unroll
  for (int i = 0; i < Pack<T, kPack>::kWords; ++i) {
    constexpr int kSize = sizeof(T);
    pack.words[i] = 4 * i < valid * kSize ? words[i] : 0;
    if (kSize == 2 && 2 * i + 1 == valid) pack.words[i] &= 0xffff;
  }
}

// Reads the pack at `column` of a row, its first `valid` columns, one by one; the others become zero.
template <class T, int kPack>
DEVICE void load_elements(Pack<T, kPack>& pack, const T* row, int64 column, int valid) {
  constexpr int kHalves = sizeof(T) == 2 ? 2 : 1, kWords = sizeof(T) == 8 ? 2 : 1;  // elements of a word, words of one
#pragma unroll
  for (int i = 0; i < kPack; i += kHalves) {
    if constexpr (sizeof(T) == 2) {
      const auto* const bits = reinterpret_cast<const unsigned short*>(row + column) + i;
      const uint32 low = i < valid ? bits[0] : 0, high = i + 1 < valid ? bits[1] : 0;
      pack.words[i / 2] = low | high << 16;
    } else {
      uint32 element[kWords];
      load_words<Cache::kKept>(row + column + i, element, i < valid);
#pragma unroll
      for (int word = 0; word < kWords; ++word) pack.words[kWords * i + word] = element[word];
    }
  }
}

// Reads the pack at `column` of a row, its first `valid` columns; the others become zero. Columns are owned by the same
// thread wherever the row lies, so that its result does not depend on it: where it does not begin at a multiple of a
// pack's size (not kAligned) neighbouring lanes read the aligned words that their packs share, and shift them alike.
template <bool kAligned, Cache kCache, class T, int kPack>
DEVICE void load_pack(Pack<T, kPack>& pack, const T* row, int64 column, int valid) {
  constexpr int kBytes = kUnit<T, kPack>, kSize = sizeof(T);
  if constexpr (!kAligned && kSize == 8) {
    // They are vectors of two words. Shifted, a weight of float64 spilled 8 to 36 bytes.
    load_elements(pack, row, column, valid);
  } else {
    Covering<T, kPack, kAligned> covering;
    load_covering<kAligned, kCache>(covering, row, column, valid);
    if constexpr (!kAligned) shift_down<T, kBytes / 8>(covering.words, past_multiple_of<kBytes>(row));
    keep_valid(pack, covering.words, valid > 0 ? valid : kPack);
  }
}

// All packs that a thread has of a row: first those of all matrices are asked for, then those of each are shifted, by
// an offset that the compiler knows.
template <class Shape, bool kAligned, Cache kCache, class T, int kPack>
DEVICE void ask_for_packs(Covering<T, kPack, kAligned> (&packs)[Shape::kPacks], const T* row, int rank, bool active) {
#pragma unroll
  for (int p = 0; p < Shape::kPacks; ++p) {
    load_covering<kAligned, kCache>(packs[p], row, Shape::column(rank, p), active ? Shape::valid(rank, p) : 0);
  }
}
template <class Shape, bool kAligned, class T, int kPack>
DEVICE void receive_packs(Pack<T, kPack> (&packs)[Shape::kPacks],
                          const Covering<T, kPack, kAligned> (&asked)[Shape::kPacks], const T* row, int rank,
                          bool active) {
  constexpr int kBytes = kUnit<T, kPack>;
  const auto receive = [&](uint32 offset) {
#pragma unroll
    for (int p = 0; p < Shape::kPacks; ++p) {
      Covering<T, kPack, kAligned> covering = asked[p];
      const int valid = active ? Shape::valid(rank, p) : 0;
      if constexpr (!kAligned) shift_down<T, kBytes / 8>(covering.words, offset);
      keep_valid(packs[p], covering.words, valid > 0 ? valid : kPack);
    }
  };
  if constexpr (kAligned) {
    receive(0);
  } else {
    with_known<sizeof(T), kBytes>(past_multiple_of<kBytes>(row), receive);
  }
}

// Which pack of a row that waits in shared memory: of the thread of this number, behind so many runs.
struct PackSlot {
  unsigned thread;
  int run;
};

// How packs lie in shared memory: the packs that kLanes neighbouring threads read at once are a run. A pack of more
// than 16 bytes lies there in pieces, the first pieces of all packs of the run side by side, then the second, so that
// neighbouring threads meet no bank conflicts.
//
// A run whose packs do not begin at a multiple of their size (not kAligned) is copied as the aligned words that hold
// it, to places that lie in the same way to a multiple of kRunGap bytes, and takes so much more; once it is there,
// packs are read from there and put where they belong.
template <class T, int kPack, int kLanes, bool kAligned>
struct SharedPacks {
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
    } else if (valid > 0) {
      Pack<T, kPack> pack;
      load_pack<true, Cache::kStreamed>(pack, row, column, valid);
      put(place, slot, pack);
    }
  }

  // What was copied of a pack that begins `offset` bytes behind a multiple of its size, as its row does.
  DEVICE static void read_covering(Pack<T, kPack>& pack, const char* place, PackSlot slot, const T* row, uint32 offset,
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
    keep_valid(pack, words, valid);
  }
  DEVICE static void read_covering(Pack<T, kPack>& pack, const char* place, PackSlot slot, const T* row, int valid) {
    with_known<sizeof(T), kPiece>(past_multiple_of<kPiece>(row),
                                  [&](uint32 offset) { read_covering(pack, place, slot, row, offset, valid); });
  }

  // All packs that this thread has of the row.
  template <class Shape>
  DEVICE static void read_covering(Pack<T, kPack> (&packs)[Shape::kPacks], const char* place, const T* row, int rank) {
    with_known<sizeof(T), kPiece>(past_multiple_of<kPiece>(row), [&](uint32 offset) {
#pragma unroll
      for (int p = 0; p < Shape::kPacks; ++p) {
        read_covering(packs[p], place, Shape::pack_slot(p), row, offset, Shape::valid(rank, p));
      }
    });
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

  DEVICE static void read(Pack<T, kPack>& pack, char* place, PackSlot slot) {
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

template <class T, int kPack>
DEVICE void store_element(T* address, const Pack<T, kPack>& pack, int i) {
  if constexpr (sizeof(T) == 8) {
    address[i] = words_to_double(pack.words[2 * i], pack.words[2 * i + 1]);
  } else if constexpr (sizeof(T) == 4) {
    address[i] = word_to_float(pack.words[i]);
  } else if constexpr (sizeof(T) == 1) {
    address[i] = T{static_cast<uint8>(pack.words[i / 4] >> (i % 4 * 8))};
  } else {
    address[i] = T{static_cast<uint16>(pack.words[i / 2] >> (i % 2 * 16))};
  }
}

template <bool kAligned, Cache kCache, class T, int kPack>
DEVICE void store_pack(T* address, const Pack<T, kPack>& pack, int valid) {
  if (kAligned && valid >= kPack) {
    store_words<kCache>(address, pack.words);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    if (i < valid) store_element(address, pack, i);
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

// The same where packs do not begin at a multiple of their size; those of kLanes neighbouring threads follow each other
// in memory. A lane writes the aligned words that begin in its pack, of which the last ends in the next lane's, and at
// the ends of the lanes' run smaller parts. All lanes of the warp come here together.
template <int kLanes, Cache kCache, class T, int kPack>
DEVICE void store_run(T* row, int64 column, const Pack<T, kPack>& pack, int valid) {
  constexpr int kBytes = kUnit<T, kPack>, kWords = Pack<T, kPack>::kWords;
  uint32 words[kWords + kBytes / 4];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = pack.words[i];
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) words[kWords + i] = shuffle_down(pack.words[i]);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const bool ends = shuffle_down(valid) < kPack || lane == kLanes - 1;
  if (valid < kPack) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (i < valid) store_element(row + column, pack, i);
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
      store_parts<T, false, kCache, kPack* static_cast<int>(sizeof(T)) / 2>(from, words, head, 4 * kWords);
    }
    if (lane == 0) store_parts<T, true, kCache, static_cast<int>(sizeof(T))>(from, words, 0, head);
  });
}

}  // namespace cunorm
