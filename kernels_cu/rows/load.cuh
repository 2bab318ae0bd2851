// What a kernel reads: lists of matrices, and of vectors that all rows share. A Load has
//
//   Raw, Packed                                           a pack as it is in memory, and what a thread keeps of it
//   fetch(raw, row, column, valid)                        starts the read of a pack
//   keep(raw, valid)                                      what is kept of it
//   ask(asked, row, rank, active), receive(packs, asked, row, rank, active)
//                                                         the same of all packs of a thread
//   unpack(packed, values)                                its values in Compute
//   stay_packed(packed)                                   between two uses: drop the values, keep the pack
//   copy(places, number, slot, row, column, valid)        starts the copy of a pack to shared memory
//   read_covering(raw, places, number, slot, row, valid)  a pack of what was copied, unless kVectors
//   read_covering(raws, places, number, row, rank)        all packs of this thread, at whatever addresses
//   clear(places, number, slot)                           zeros instead, for a pack that is never copied
//   put(places, number, slot, packed)                     a pack that is there already instead
//   read(raw, places, number, slot)                       a pack that was copied, cleared or put
//   stands_at(raw, row, column)                           after read: for what no place holds (philox.cuh,
//                                                         row_numbers.cuh)
//   place_bytes(columns)                                  of shared memory for a row
#pragma once
#include "rows/functions.cuh"
#include "rows/philox.cuh"
#include "rows/row_numbers.cuh"
#include "rows/shared_packs.cuh"

namespace cunorm {

// Rows of a matrix whose columns are contiguous. A vector for all rows is a matrix whose rows are 0 apart.
// kLanes neighbouring threads of a warp hold neighbouring packs of a row.
template <class T, int kPack_, int kLanes, Access kAccess, Cache kCache, bool kTwoStrides = false,
          class Starts = RowStarts<kTwoStrides>>
struct LoadRows {
  static constexpr int kPack = kPack_;
  using Shared = SharedPacks<T, kPack, kLanes, kAccess>;
  static constexpr int kColumnBytes = sizeof(T);
  static constexpr bool kVectors = kAccess != Access::kAnywhere;
  using Packed = Pack<T, kPack>;
  const T* data;
  Starts starts;

  DEVICE void fetch(Packed& pack, int64 row, int64 column, int valid) const {
    load_pack<kAccess, kCache>(pack, data + starts.of(row), column, valid);
  }
  template <class Shape>
  struct Asked {
    Covering<T, kPack, kAccess> packs[Shape::kPacks];
  };
  template <class Shape>
  DEVICE void ask(Asked<Shape>& asked, int64 row, int rank, bool active) const {
    ask_for_packs<Shape, kCache>(asked.packs, data + starts.of(row), rank, active);
  }
  template <class Shape>
  DEVICE void receive(Packed (&packs)[Shape::kPacks], const Asked<Shape>& asked, int64 row, int rank,
                      bool active) const {
    receive_packs<Shape>(packs, asked.packs, data + starts.of(row), rank, active);
  }
  // The same of one pack. Columns past the last are whatever lies there.
  using AskedPack = Covering<T, kPack, kAccess>;
  DEVICE void ask(AskedPack& asked, int64 row, int64 column, int valid) const {
    load_covering<kCache>(asked, data + starts.of(row), column, valid);
  }
  DEVICE void receive(Packed& pack, AskedPack asked, int64 row) const {
    constexpr int kBytes = kUnit<T, kPack>;
    if constexpr (!kVectors) shift_down<T, kBytes / 8>(asked.words, past_multiple_of<kBytes>(data + starts.of(row)));
#pragma unroll
    for (int i = 0; i < Packed::kWords; ++i) pack.words[i] = asked.words[i];
  }
  template <class Compute>
  DEVICE void unpack(const Packed& pack, Compute (&values)[kPack]) const {
    cunorm::unpack(pack, values);
  }
  DEVICE void stay_packed(Packed& pack) const { cunorm::stay_packed(pack); }
  static constexpr int place_bytes(int columns) { return Shared::bytes(columns); }
  template <Fetch kFetch>
  DEVICE void copy(char* place, PackSlot slot, int64 row, int64 column, int valid) const {
    Shared::template copy<kFetch>(place, slot, data + starts.of(row), column, valid);
  }
  DEVICE void read_covering(Packed& pack, const char* place, PackSlot slot, int64 row, int valid) const {
    Shared::read_covering(pack, place, slot, data + starts.of(row), valid);
  }
  template <class Shape>
  DEVICE void read_covering(Packed (&packs)[Shape::kPacks], const char* place, int64 row, int rank) const {
    Shared::template read_covering<Shape>(packs, place, data + starts.of(row), rank);
  }
  DEVICE void clear(char* place, PackSlot slot) const {
    if constexpr (kVectors) Shared::put(place, slot, {});
  }
  DEVICE void put(char* place, PackSlot slot, const Packed& pack) const { Shared::put(place, slot, pack); }
  DEVICE void read(Packed& pack, char* place, PackSlot slot) const { Shared::read(pack, place, slot); }
  DEVICE void stands_at(Packed&, int64, int64) const {}
};

// A vector for all rows, or for a group of them, that begins at an odd address. It is read again for every row: shifted
// beside a row at odd addresses too it spilled 4 to 72 bytes.
template <class T, int kPack, int kLanes, class Starts = RowStarts<false>>
struct LoadElements : LoadRows<T, kPack, kLanes, Access::kAnywhere, Cache::kKept, false, Starts> {
  DEVICE void fetch(Pack<T, kPack>& pack, int64 row, int64 column, int valid) const {
    load_elements(pack, this->data + this->starts.of(row), column, valid);
  }
};

// Several matrices that are read together. In shared memory all places of the first come before those of the second:
// with the matrices of a row side by side neighbouring rows of 32 columns would meet in the same banks.
template <class... Loads>
struct Matrices;

template <>
struct Matrices<> {
  static constexpr int kCount = 0;
  static constexpr int kColumnBytes = 0;
  static constexpr bool kVectors = true;
  struct Packed {};
  using Raw = Packed;

  DEVICE void fetch(Raw&, int64, int64, int) const {}
  template <class Shape>
  struct Asked {};
  template <class Shape>
  DEVICE void ask(Asked<Shape>&, int64, int, bool) const {}
  template <class Shape>
  DEVICE void receive(Packed (&)[Shape::kPacks], const Asked<Shape>&, int64, int, bool) const {}
  DEVICE Packed keep(const Raw& raw, int) const { return raw; }
  template <class Values>
  DEVICE void unpack(const Packed&, Values) const {}
  DEVICE void stay_packed(Packed&) const {}
  static constexpr int place_bytes(int) { return 0; }
  template <int kColumns, int kPlaces, Fetch kFetch>
  DEVICE void copy(char*, int, PackSlot, int64, int64, int) const {}
  template <int kColumns, int kPlaces>
  DEVICE void read_covering(Raw&, char*, int, PackSlot, int64, int) const {}
  template <class Shape, int kPlaces>
  DEVICE void read_covering(Raw (&)[Shape::kPacks], char*, int, int64, int) const {}
  template <int kColumns, int kPlaces>
  DEVICE void clear(char*, int, PackSlot) const {}
  template <int kColumns, int kPlaces>
  DEVICE void put(char*, int, PackSlot, const Packed&) const {}
  template <int kColumns, int kPlaces>
  DEVICE void read(Raw&, char*, int, PackSlot) const {}
  DEVICE void stands_at(Raw&, int64, int64) const {}
};

template <class First, class... Others>
struct Matrices<First, Others...> {
  static constexpr int kPack = First::kPack;
  static constexpr int kCount = 1 + sizeof...(Others);
  static constexpr int kColumnBytes = First::kColumnBytes + Matrices<Others...>::kColumnBytes;
  static constexpr bool kVectors = First::kVectors;
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
  struct Asked {
    typename First::template Asked<Shape> first;
    typename Matrices<Others...>::template Asked<Shape> others;
  };
  template <class Shape>
  DEVICE void ask(Asked<Shape>& asked, int64 row, int rank, bool active) const {
    first.template ask<Shape>(asked.first, row, rank, active);
    others.template ask<Shape>(asked.others, row, rank, active);
  }
  template <class Shape>
  DEVICE void receive(Packed (&packs)[Shape::kPacks], const Asked<Shape>& asked, int64 row, int rank,
                      bool active) const {
    typename First::Packed own[Shape::kPacks];
    typename Matrices<Others...>::Packed rest[Shape::kPacks];
    first.template receive<Shape>(own, asked.first, row, rank, active);
    others.template receive<Shape>(rest, asked.others, row, rank, active);
#pragma unroll
    for (int p = 0; p < Shape::kPacks; ++p) packs[p] = {own[p], rest[p]};
  }
  DEVICE Packed keep(const Raw& raw, int) const { return raw; }
  // values: [matrix][column]
  template <class Compute>
  DEVICE void unpack(const Packed& packed, Compute (*values)[kPack]) const {
    first.unpack(packed.first, values[0]);
    others.unpack(packed.others, values + 1);
  }
  DEVICE void stay_packed(Packed& packed) const {
    first.stay_packed(packed.first);
    others.stay_packed(packed.others);
  }
  static constexpr int place_bytes(int columns) {
    return First::place_bytes(columns) + Matrices<Others...>::place_bytes(columns);
  }
  template <int kColumns, int kPlaces, Fetch kFetch>
  DEVICE void copy(char* places, int number, PackSlot slot, int64 row, int64 column, int valid) const {
    first.template copy<kFetch>(place<kColumns>(places, number), slot, row, column, valid);
    others.template copy<kColumns, kPlaces, kFetch>(places_of_others<kColumns, kPlaces>(places), number, slot, row,
                                                    column, valid);
  }
  template <int kColumns, int kPlaces>
  DEVICE void read_covering(Raw& raw, char* places, int number, PackSlot slot, int64 row, int valid) const {
    first.read_covering(raw.first, place<kColumns>(places, number), slot, row, valid);
    others.template read_covering<kColumns, kPlaces>(raw.others, places_of_others<kColumns, kPlaces>(places), number,
                                                     slot, row, valid);
  }
  template <class Shape, int kPlaces>
  DEVICE void read_covering(Raw (&raws)[Shape::kPacks], char* places, int number, int64 row, int rank) const {
    typename First::Packed own[Shape::kPacks];
    typename Matrices<Others...>::Packed rest[Shape::kPacks];
    first.template read_covering<Shape>(own, place<Shape::kCapacity>(places, number), row, rank);
    others.template read_covering<Shape, kPlaces>(rest, places_of_others<Shape::kCapacity, kPlaces>(places), number,
                                                  row, rank);
#pragma unroll
    for (int p = 0; p < Shape::kPacks; ++p) raws[p] = {own[p], rest[p]};
  }
  template <int kColumns, int kPlaces>
  DEVICE void clear(char* places, int number, PackSlot slot) const {
    first.clear(place<kColumns>(places, number), slot);
    others.template clear<kColumns, kPlaces>(places_of_others<kColumns, kPlaces>(places), number, slot);
  }
  template <int kColumns, int kPlaces>
  DEVICE void put(char* places, int number, PackSlot slot, const Packed& packed) const {
    first.put(place<kColumns>(places, number), slot, packed.first);
    others.template put<kColumns, kPlaces>(places_of_others<kColumns, kPlaces>(places), number, slot, packed.others);
  }
  template <int kColumns, int kPlaces>
  DEVICE void read(Raw& raw, char* places, int number, PackSlot slot) const {
    first.read(raw.first, place<kColumns>(places, number), slot);
    others.template read<kColumns, kPlaces>(raw.others, places_of_others<kColumns, kPlaces>(places), number, slot);
  }
  DEVICE void stands_at(Raw& raw, int64 row, int64 column) const {
    first.stands_at(raw.first, row, column);
    others.stands_at(raw.others, row, column);
  }

 private:
  template <int kColumns>
  DEVICE static char* place(char* places, int number) {
    return places + number * First::place_bytes(kColumns);
  }
  template <int kColumns, int kPlaces>
  DEVICE static char* places_of_others(char* places) {
    return places + kPlaces * First::place_bytes(kColumns);
  }
};

// The rows that are normalised: those of x, or s = prologue(x, ...) rounded to the format S once, so that all who read
// s see the same. A thread keeps s alone.
template <class S, int kPack, class Operation, class Inputs, bool kPrologue = Operation::kPrologue>
struct LoadSource {
  static constexpr bool kVectors = Inputs::kVectors;
  using Raw = typename Inputs::Packed;
  using Packed = Pack<S, kPack>;
  Inputs inputs;
  Operation operation;

  DEVICE void fetch(Raw& raw, int64 row, int64 column, int valid) const { inputs.fetch(raw, row, column, valid); }
  template <class Shape>
  using Asked = typename Inputs::template Asked<Shape>;
  template <class Shape>
  DEVICE void ask(Asked<Shape>& asked, int64 row, int rank, bool active) const {
    inputs.template ask<Shape>(asked, row, rank, active);
  }
  template <class Shape>
  DEVICE void receive(Packed (&packs)[Shape::kPacks], const Asked<Shape>& asked, int64 row, int rank,
                      bool active) const {
    Raw raws[Shape::kPacks];
    inputs.template receive<Shape>(raws, asked, row, rank, active);
#pragma unroll
    for (int p = 0; p < Shape::kPacks; ++p) packs[p] = keep(raws[p], active ? Shape::valid(rank, p) : 0);
  }
  DEVICE Packed keep(const Raw& raw, int valid) const {
    if constexpr (!kPrologue) {
      return raw.first;
    } else {
      typename Operation::Compute values[Inputs::kCount][kPack], s[kPack];
      inputs.unpack(raw, values);
#pragma unroll
      for (int i = 0; i < kPack; ++i) s[i] = i < valid ? operation.prologue(values, i) : 0;
      return pack_values<S>(s);
    }
  }
  template <class Compute>
  DEVICE void unpack(const Packed& packed, Compute (&values)[kPack]) const {
    cunorm::unpack(packed, values);
  }
  DEVICE void stay_packed(Packed& packed) const { cunorm::stay_packed(packed); }
  template <int kColumns, int kPlaces, Fetch kFetch>
  DEVICE void copy(char* places, int number, PackSlot slot, int64 row, int64 column, int valid) const {
    inputs.template copy<kColumns, kPlaces, kFetch>(places, number, slot, row, column, valid);
  }
  static constexpr int place_bytes(int columns) { return Inputs::place_bytes(columns); }
  template <int kColumns, int kPlaces>
  DEVICE void read_covering(Raw& raw, char* places, int number, PackSlot slot, int64 row, int valid) const {
    inputs.template read_covering<kColumns, kPlaces>(raw, places, number, slot, row, valid);
  }
  template <class Shape, int kPlaces>
  DEVICE void read_covering(Raw (&raws)[Shape::kPacks], char* places, int number, int64 row, int rank) const {
    inputs.template read_covering<Shape, kPlaces>(raws, places, number, row, rank);
  }
  template <int kColumns, int kPlaces>
  DEVICE void put(char* places, int number, PackSlot slot, const Raw& raw) const {
    inputs.template put<kColumns, kPlaces>(places, number, slot, raw);
  }
  template <int kColumns, int kPlaces>
  DEVICE void clear(char* places, int number, PackSlot slot) const {
    inputs.template clear<kColumns, kPlaces>(places, number, slot);
  }
  template <int kColumns, int kPlaces>
  DEVICE void read(Raw& raw, char* places, int number, PackSlot slot) const {
    inputs.template read<kColumns, kPlaces>(raw, places, number, slot);
  }
  DEVICE void stands_at(Raw& raw, int64 row, int64 column) const { inputs.stands_at(raw, row, column); }
};

}  // namespace cunorm
