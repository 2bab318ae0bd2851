// The second implementation of kernels_cu/rows/platform.cuh: the same names, on a CPU. Memory is read and written by
// plain C++, so that sanitizers see it.
#pragma once
#include <bit>
#include <cmath>

#include "runtime.hpp"

#define DEVICE inline
#define __global__
#define __constant__ [[maybe_unused]] static
// Used: the runtime writes them too, before a CTA starts.
#define __shared__ [[gnu::used]] static thread_local
#define __cluster_dims__(...)
#define __launch_bounds__(...)

inline void __syncthreads() { cpu::barrier(0, static_cast<int>(blockDim.x)); }

namespace cunorm {

using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;

inline float word_to_float(uint32 word) { return std::bit_cast<float>(word); }
inline uint32 float_to_word(float value) { return std::bit_cast<uint32>(value); }
inline double words_to_double(uint32 low, uint32 high) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(high) << 32 | low);
}
inline void double_to_words(double value, uint32& low, uint32& high) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  low = static_cast<uint32>(bits);
  high = static_cast<uint32>(bits >> 32);
}

struct half {
  uint16 bits;

  static float decode(uint16 bits) {
    const int exponent = bits >> 10 & 31;
    const int mantissa = bits & 1023;
    float magnitude;
    if (exponent == 31) {
      magnitude = mantissa ? NAN : INFINITY;
    } else if (exponent == 0) {
      magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    } else {
      magnitude = std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
    }
    return bits >> 15 ? -magnitude : magnitude;
  }
  static uint16 encode(float value) {
    const uint32 sign = float_to_word(value) >> 16 & 0x8000;
    const float magnitude = std::fabs(value);
    if (value != value) return 0x7fff;
    if (magnitude >= 65520.f) return static_cast<uint16>(sign | 0x7c00);
    // Below 2^-14 the spacing is 2^-24, and the bits count multiples of it.
    if (magnitude < 0x1p-14f)
      return static_cast<uint16>(sign | static_cast<uint32>(std::nearbyint(magnitude * 0x1p24f)));
    // Otherwise 13 bits go, to nearest even; a carry into the exponent is right.
    const uint32 word = float_to_word(magnitude) - (112u << 23);
    return static_cast<uint16>(sign | (word + 0xfff + (word >> 13 & 1)) >> 13);
  }
  static float decode_low(uint32 word) { return decode(static_cast<uint16>(word)); }
  static float decode_high(uint32 word) { return decode(static_cast<uint16>(word >> 16)); }
  static uint32 encode_word(float low, float high) { return encode(low) | static_cast<uint32>(encode(high)) << 16; }
};

struct bfloat16 {
  uint16 bits;

  static uint16 encode(float value) {
    const uint32 word = float_to_word(value);
    if (value != value) return 0x7fff;
    return static_cast<uint16>((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  static float decode_low(uint32 word) { return word_to_float(word << 16); }
  static float decode_high(uint32 word) { return word_to_float(word & 0xffff0000u); }
  static uint32 encode_word(float low, float high) { return encode(low) | static_cast<uint32>(encode(high)) << 16; }
};

// What a GPU without instructions for 8 bits computes (float8.cuh) is computed here too.
constexpr bool kFloat8Instructions = false;
inline uint32 encode_e4m3_pair(float, float) { return 0; }
inline uint32 encode_e5m2_pair(float, float) { return 0; }

inline uint32 larger_halves(uint32 a, uint32 b) {
  return ((a >> 16 > b >> 16 ? a : b) & 0xffff0000u) | (((a & 0xffff) > (b & 0xffff) ? a : b) & 0xffff);
}

inline float larger_magnitude(float a, float b) {
  const uint32 left = float_to_word(a) & 0x7fffffff, right = float_to_word(b) & 0x7fffffff;
  return word_to_float(left > right ? left : right);
}

inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline double multiply_add(double a, double b, double c) { return std::fma(a, b, c); }

inline int power_of_two_up_to(int n) { return static_cast<int>(std::bit_floor(static_cast<unsigned>(n))); }

// Cut off towards zero, the last bit set if anything was lost.
inline float before_narrowing(float value) { return value; }
inline float before_narrowing(double value) {
  float cut = static_cast<float>(value);
  if (static_cast<double>(cut) == value || value != value) return cut;
  if (std::fabs(static_cast<double>(cut)) > std::fabs(value)) cut = std::nextafter(cut, 0.f);
  return word_to_float(float_to_word(cut) | 1u);
}

inline float reciprocal_sqrt(float value) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(value))); }
inline double reciprocal_sqrt(double value) { return 1.0 / std::sqrt(value); }

template <int kBytes>
uint32 past_multiple_of(const void* address) {
  return static_cast<uint32>(reinterpret_cast<std::uintptr_t>(address) % kBytes);
}

inline uint32 funnel_shift(uint32 low, uint32 high, uint32 bits) {
  return static_cast<uint32>((static_cast<std::uint64_t>(high) << 32 | low) >> bits % 32);
}

enum class Cache { kStreamed, kKept };

template <int kWords>
void check_alignment(const void* address) {
  static_assert(kWords == 1 || kWords == 2 || kWords % 4 == 0, "a vector access moves 4, 8 or 16 bytes");
  constexpr std::uintptr_t kBytes = kWords < 4 ? 4 * kWords : 16;
  if (reinterpret_cast<std::uintptr_t>(address) % kBytes != 0) cpu::fail("misaligned vector access");
}

template <Cache, int kWords>
void load_words(const void* address, uint32 (&words)[kWords], bool there = true) {
  if (there) check_alignment<kWords>(address);
  for (int i = 0; i < kWords; ++i) words[i] = there ? static_cast<const uint32*>(address)[i] : 0;
}

template <Cache, int kWords>
void store_words(void* address, const uint32 (&words)[kWords]) {
  check_alignment<kWords>(address);
  for (int i = 0; i < kWords; ++i) static_cast<uint32*>(address)[i] = words[i];
}

// What lies beside the bytes is NaN here, whatever it is on a GPU.
template <Cache, int kUnit, bool kAligned, int kWords>
void load_covering_words(const void* start, int64 position, int bytes, uint32 (&words)[kWords]) {
  static_assert(kUnit == 4 || kUnit == 8 || kUnit == 16, "a vector access moves 4, 8 or 16 bytes");
  for (uint32& word : words) word = bytes > 0 ? ~0u : 0;
  if (bytes <= 0) return;
  const uint32 offset = past_multiple_of<kUnit>(start);
  if (position % kUnit != 0 || (kAligned && offset != 0)) cpu::fail("misaligned vector access");
  const auto* const from = static_cast<const unsigned char*>(start) + position;
  for (int i = 0; i < bytes; ++i) reinterpret_cast<unsigned char*>(words)[offset + static_cast<uint32>(i)] = from[i];
}

inline char* dynamic_shared() { return cpu::dynamic_shared(); }

template <int kWords>
void load_shared_words(const void* address, uint32 (&words)[kWords]) {
  load_words<Cache::kKept>(address, words);
}

template <int kWords>
void store_shared_words(void* address, const uint32 (&words)[kWords]) {
  store_words<Cache::kKept>(address, words);
}

// Until somebody has waited for it the place holds NaN, whatever was there before.
template <int kBytes>
void copy_words(void* to, const uint32 (&words)[kBytes / 4]) {
  uint32 unknown[kBytes / 4];
  for (uint32& word : unknown) word = ~0u;
  store_words<Cache::kKept>(to, unknown);
  cpu::copy_start(to, words, kBytes);
}
enum class Fetch { kAlone, kNeighbours, kCached };
template <int kBytes, Fetch>
void copy_async(void* to, const void* from) {
  uint32 words[kBytes / 4];
  load_words<Cache::kStreamed>(from, words);
  copy_words<kBytes>(to, words);
}

// What AddressSanitizer knows to be in no array is NaN.
template <int kBytes, Fetch>
void copy_covering_async(void* to, const void* from) {
  check_alignment<kBytes / 4>(from);
  uint32 words[kBytes / 4];
  int inside = 0;
  for (int i = 0; i < kBytes; ++i) {
    const auto* const byte = static_cast<const unsigned char*>(from) + i;
    const bool there = cpu::in_array(byte);
    reinterpret_cast<unsigned char*>(words)[i] = there ? *byte : 0xff;
    inside += there;
  }
  if (inside == 0) cpu::fail("a copy of what is in no array");
  copy_words<kBytes>(to, words);
}
template <class T>
void prefetch(const T* address) {
  const volatile T read = *address;  // it must be there
  static_cast<void>(read);
}
template <int kCount, class T>
void discard(const T* first) {
  if (reinterpret_cast<std::uintptr_t>(first) % 128 != 0) cpu::fail("discarded lines begin at a multiple of 128 bytes");
  std::memset(const_cast<T*>(first), 0xff, kCount * sizeof(T));  // NaN, for who reads it all the same
}
inline void copies_commit() { cpu::copies_commit(); }
template <int kPending>
void copies_wait() {
  cpu::copies_wait(kPending);
}

inline void forget(uint32&) {}
inline void forget(int64&) {}
template <class T>
inline T* begin_of_row(T* row) {
  return row;
}
inline int64 wide_index(int index) { return index; }

template <class T>
T shuffle_xor(T value, int lane_mask) {
  cpu::shuffle_xor(&value, sizeof(T), lane_mask);
  return value;
}

template <class T>
T shuffle_down(T value) {
  cpu::shuffle_down(&value, sizeof(T));
  return value;
}

template <class T>
T shuffle(T value, int lane) {
  cpu::shuffle_from(&value, sizeof(T), lane);
  return value;
}

inline uint32 largest_of_warp(uint32 value) {
  for (int mask = 16; mask > 0; mask /= 2) value = std::max(value, shuffle_xor(value, mask));
  return value;
}

inline void warp_barrier() { shuffle_xor(0, 0); }

inline void barrier(int id, int threads) {
  if (id < 1 || id > 15) cpu::fail("a named barrier has a number from 1 to 15");
  cpu::barrier(id, threads);
}

// The machine runs one launch after the other, but notes who has waited.
inline void wait_for_kernel_before() { cpu::wait_for_kernel_before(); }
inline void next_kernel_may_begin() {}

inline int cluster_rank() { return cpu::cluster_rank(); }
inline void cluster_start() { cpu::cluster_start(); }

struct Mailbox {
  unsigned long long state;

  void init() { cpu::mailbox_init(this); }
  void expect(int bytes) { cpu::mailbox_expect(this, bytes); }
  void wait(int phase) { cpu::mailbox_wait(this, phase); }
  template <class T, int kCount>
  void send(T* slot, int rank, const T (&values)[kCount]) {
    cpu::mailbox_send(this, slot, rank, values, sizeof(values));
  }
};

// Functions of the mathematics library, for functions.cuh.
inline float reciprocal(float value) { return 1.0f / value; }
inline double reciprocal(double value) { return 1.0 / value; }
inline float exponential(float value) { return std::exp(value); }
inline double exponential(double value) { return std::exp(value); }
inline float quick_exponential(float value) { return std::exp2(value * 1.4426950408889634f); }
inline double quick_exponential(double value) { return std::exp(value); }
inline float logarithm(float value) { return std::log(value); }
inline double logarithm(double value) { return std::log(value); }
inline float square_root(float value) { return std::sqrt(value); }
inline double square_root(double value) { return std::sqrt(value); }
inline float hyperbolic_tangent(float value) { return std::tanh(value); }
inline double hyperbolic_tangent(double value) { return std::tanh(value); }
inline float error_function(float value) { return std::erf(value); }
inline double error_function(double value) { return std::erf(value); }
inline float absolute(float value) { return std::fabs(value); }
inline double absolute(double value) { return std::fabs(value); }

}  // namespace cunorm
