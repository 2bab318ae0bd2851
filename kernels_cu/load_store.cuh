// What is read before the norm and written after it. A kernel is a template over a Load and a Store; a new fusion is a
// new functor here, not a new kernel.
//
// Load:   fetch(pack, row, column, valid)   starts the read of a pack, in its storage format
//         unpack(pack, values)              its values in Compute
//         stay_packed(pack)                 between two uses: drop the values, keep the pack
//         copy(place, slot, row, column, valid)   starts the copy of a pack to shared memory
//         clear(place, slot)                      zeros instead, for a pack that is never copied
//         read(pack, place, slot)                 a pack that was copied, or cleared
// Store:  fetch(operands, column, valid)    starts the read of what the store needs for a column (weight, bias)
//         store(row, column, valid, xhat, operands)
#pragma once
#include "pack.cuh"

namespace cunorm {

// Rows of a matrix whose columns are contiguous.
template <class T, int kPack, bool kAligned, Cache kCache>
struct LoadRows {
  using Packed = Pack<T, kPack>;
  const T* data;
  int64 row_stride;  // elements

  DEVICE void fetch(Packed& pack, int64 row, int64 column, int valid) const {
    load_pack<kAligned, kCache>(pack, data + row * row_stride + column, valid);
  }
  template <class Compute>
  DEVICE void unpack(const Packed& pack, Compute (&values)[kPack]) const {
    cunorm::unpack(pack, values);
  }
  DEVICE void stay_packed(Packed& pack) const { cunorm::stay_packed(pack); }

  static constexpr int kColumnBytes = sizeof(T);
  static constexpr bool kVectors = kAligned;
  template <int kColumns, bool kNeighbours>
  DEVICE void copy(char* place, int slot, int64 row, int64 column, int valid) const {
    SharedPacks<T, kPack, kColumns>::template copy<kAligned, kNeighbours>(place, slot, data + row * row_stride + column,
                                                                          valid);
  }
  template <int kColumns>
  DEVICE void clear(char* place, int slot) const {
    SharedPacks<T, kPack, kColumns>::clear(place, slot);
  }
  template <int kColumns>
  DEVICE void read(Packed& pack, char* place, int slot) const {
    SharedPacks<T, kPack, kColumns>::read(pack, place, slot);
  }
};

// y = xhat * weight + bias, with 1 + weight if kZeroCentered.
template <class Y, class Weight, class Bias, int kPack, bool kZeroCentered, bool kAligned, Cache kCache>
struct StoreAffine {
  struct Operands {
    Pack<Weight, kPack> weight;
    Pack<Bias, kPack> bias;
  };
  Y* data;
  int64 row_stride;  // elements
  const Weight* weight;
  const Bias* bias;

  DEVICE void fetch(Operands& operands, int64 column, int valid) const {
    if constexpr (kPresent<Weight>) load_pack<kAligned, Cache::kKept>(operands.weight, weight + column, valid);
    if constexpr (kPresent<Bias>) load_pack<kAligned, Cache::kKept>(operands.bias, bias + column, valid);
  }

  template <class Compute>
  DEVICE void store(int64 row, int64 column, int valid, Compute (&xhat)[kPack], Operands& operands) const {
    stay_packed(operands.weight);
    stay_packed(operands.bias);
    Compute gamma[kPack], beta[kPack];
    if constexpr (kPresent<Weight>) unpack(operands.weight, gamma);
    if constexpr (kPresent<Bias>) unpack(operands.bias, beta);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if constexpr (kPresent<Weight> && kZeroCentered) gamma[i] += 1;
      if constexpr (kPresent<Weight> && kPresent<Bias>) {
        xhat[i] = multiply_add(xhat[i], gamma[i], beta[i]);
      } else if constexpr (kPresent<Weight>) {
        xhat[i] *= gamma[i];
      } else if constexpr (kPresent<Bias>) {
        xhat[i] += beta[i];
      }
    }
    store_pack<kAligned, kCache>(data + row * row_stride + column, pack_values<Y>(xhat), valid);
  }
};

// The rows of dx: values are stored as they come.
template <class T, int kPack, bool kAligned>
struct StoreRows {
  T* data;
  int64 row_stride;  // elements

  template <class Compute>
  DEVICE void store(int64 row, int64 column, int valid, const Compute (&values)[kPack]) const {
    store_pack<kAligned, Cache::kKept>(data + row * row_stride + column, pack_values<T>(values), valid);
  }
};

// g = dy * weight, the gradient of the normalised values; with 1 + weight if kZeroCentered.
template <class Weight, int kPack, bool kZeroCentered, bool kAligned>
struct ScaleByWeight {
  using Operands = Pack<Weight, kPack>;
  const Weight* weight;

  static constexpr int kColumnBytes = kPresent<Weight> ? sizeof(Weight) : 0;

  DEVICE void fetch(Operands& operands, int64 column, int valid) const {
    if constexpr (kPresent<Weight>) load_pack<kAligned, Cache::kKept>(operands, weight + column, valid);
  }
  template <int kColumns>
  DEVICE void copy(char* place, int slot, int64 column, int valid) const {
    if constexpr (kPresent<Weight>) {
      using Packs = SharedPacks<Weight, kPack, kColumns>;
      if (valid <= 0) Packs::clear(place, slot);
      Packs::template copy<kAligned, false>(place, slot, weight + column, valid);
    }
  }
  template <int kColumns>
  DEVICE void read(Operands& operands, char* place, int slot) const {
    if constexpr (kPresent<Weight>) SharedPacks<Weight, kPack, kColumns>::read(operands, place, slot);
  }
  // g, or g plus one term that is the same for all columns.
  template <class Compute, class... Term>
  DEVICE void apply(const Compute (&dy)[kPack], const Operands& operands, Compute (&g)[kPack], Term... term) const {
    if constexpr (kPresent<Weight>) unpack(operands, g);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if constexpr (kPresent<Weight> && kZeroCentered) g[i] += 1;
      if constexpr (!kPresent<Weight>) {
        g[i] = (dy[i] + ... + term);
      } else if constexpr (sizeof...(term) == 0) {
        g[i] *= dy[i];
      } else {
        g[i] = multiply_add(dy[i], g[i], term...);
      }
    }
  }
};

}  // namespace cunorm
