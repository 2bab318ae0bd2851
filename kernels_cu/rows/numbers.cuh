// Number formats, and arithmetic that is spelled differently on different hardware.
#pragma once

#define DEVICE __device__ __forceinline__

namespace cunorm {

using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;

// Storage formats of 16 bits; arithmetic happens in float. A 32-bit word holds two values, the first in the low half.
struct half {
  uint16 bits;

  DEVICE static float decode(uint16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  DEVICE static uint16 encode(float value) {
    uint16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  DEVICE static float decode_low(uint32 word) { return decode(static_cast<uint16>(word)); }
  DEVICE static float decode_high(uint32 word) { return decode(static_cast<uint16>(word >> 16)); }
  DEVICE static uint32 encode_word(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return encode(low) | static_cast<uint32>(encode(high)) << 16;
#endif
  }
};

struct bfloat16 {
  uint16 bits;

  DEVICE static uint16 encode(float value) {
#if __CUDA_ARCH__ >= 800
    uint16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    const uint32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN stays NaN
    return static_cast<uint16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
  }
  DEVICE static float decode_low(uint32 word) { return __uint_as_float(word << 16); }
  DEVICE static float decode_high(uint32 word) { return __uint_as_float(word & 0xffff0000u); }
  DEVICE static uint32 encode_word(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return encode(low) | static_cast<uint32>(encode(high)) << 16;
#endif
  }
};

// Two numbers of 8 bits, the first in the low byte; what is too large becomes the largest.
#if __CUDA_ARCH__ >= 890
constexpr bool kFloat8Instructions = true;
DEVICE uint32 encode_e4m3_pair(float low, float high) {
  uint16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE uint32 encode_e5m2_pair(float low, float high) {
  uint16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
#else
constexpr bool kFloat8Instructions = false;
DEVICE uint32 encode_e4m3_pair(float, float) { return 0; }
DEVICE uint32 encode_e5m2_pair(float, float) { return 0; }
#endif

DEVICE float word_to_float(uint32 word) { return __uint_as_float(word); }
DEVICE uint32 float_to_word(float value) { return __float_as_uint(value); }
DEVICE double words_to_double(uint32 low, uint32 high) {
  return __hiloint2double(static_cast<int>(high), static_cast<int>(low));
}
DEVICE void double_to_words(double value, uint32& low, uint32& high) {
  low = static_cast<uint32>(__double2loint(value));
  high = static_cast<uint32>(__double2hiint(value));
}

// Of two numbers of 16 bits in a word, each the larger, without a sign.
DEVICE uint32 larger_halves(uint32 a, uint32 b) {
#if __CUDA_ARCH__ >= 900
  uint32 larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  const uint32 high = a >> 16 > b >> 16 ? a : b, low = (a & 0xffff) > (b & 0xffff) ? a : b;
  return (high & 0xffff0000u) | (low & 0xffff);
#endif
}

// The larger of |a| and |b|; NaN where either is. On Hopper one instruction; elsewhere ptxas spilled 4 to 36 bytes
// beside it.
DEVICE float larger_magnitude(float a, float b) {
#if __CUDA_ARCH__ == 900
  float larger;
  asm("{\n"
      ".reg .f32 a, b;\n"
      "abs.f32 a, %1;\n"
      "abs.f32 b, %2;\n"
      "max.NaN.f32 %0, a, b;\n"
      "}\n"
      : "=f"(larger)
      : "f"(a), "f"(b));
  return larger;
#else
  const uint32 left = __float_as_uint(a) & 0x7fffffff, right = __float_as_uint(b) & 0x7fffffff;
  return __uint_as_float(left > right ? left : right);
#endif
}

// a * b + c, rounded once. Kernels are compiled with -fmad=false: left to itself ptxas fuses a product and a sum in one
// variant of a kernel and not in another, and the same row gets other bits.
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }

// The largest power of two that is no more than n, 0 of 0.
DEVICE int power_of_two_up_to(int n) { return n > 0 ? 1 << (31 - __clz(n)) : 0; }

// To a format of 16 bits by way of float, without rounding twice: the float is cut off and its last bit set if anything
// was lost (round to odd), which leaves the last rounding as it would have been.
DEVICE float before_narrowing(float value) { return value; }
DEVICE float before_narrowing(double value) {
  const float cut = __double2float_rz(value);
  return static_cast<double>(cut) == value || value != value ? cut : __uint_as_float(__float_as_uint(cut) | 1u);
}

// Correctly rounded 1 / sqrt(value).
DEVICE float reciprocal_sqrt(float value) { return __frsqrt_rn(value); }
DEVICE double reciprocal_sqrt(double value) { return 1.0 / sqrt(value); }

// The 32 bits that begin `bits` % 32 bits after the first of `low`, behind which `high` follows.
DEVICE uint32 funnel_shift(uint32 low, uint32 high, uint32 bits) { return __funnelshift_r(low, high, bits); }

// Functions of the mathematics library, for functions.cuh.
// Within an ulp, and 0 of infinity. A division has a branch with a call for its rare cases, between any two of which
// the compiler moves nothing: the backward pass of rms_norm_gated had 32 in a row of 1024 columns.
DEVICE float reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
DEVICE double reciprocal(double value) { return 1.0 / value; }
DEVICE float exponential(float value) { return expf(value); }
DEVICE double exponential(double value) { return exp(value); }
// Two instructions, exp's own has eight: off by |value| + 4 units in the last place at most, which is little beside 1.
DEVICE float quick_exponential(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value * 1.4426950408889634f));
  return result;
}
DEVICE double quick_exponential(double value) { return exp(value); }
DEVICE float logarithm(float value) { return logf(value); }
DEVICE double logarithm(double value) { return log(value); }
DEVICE float square_root(float value) { return sqrtf(value); }
DEVICE double square_root(double value) { return sqrt(value); }
DEVICE float hyperbolic_tangent(float value) { return tanhf(value); }
DEVICE double hyperbolic_tangent(double value) { return tanh(value); }
DEVICE float error_function(float value) { return erff(value); }
DEVICE double error_function(double value) { return erf(value); }
DEVICE float absolute(float value) { return fabsf(value); }
DEVICE double absolute(double value) { return fabs(value); }

}  // namespace cunorm
