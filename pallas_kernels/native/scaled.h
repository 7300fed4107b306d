// Vectors of int8 and fp8 (e4m3) pools, each with a scale: see pallas_kernels/ragged_paged_attention/quantized.py.

#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "simd.h"

namespace NATIVE_ISA {

struct Float8 {  // e4m3 without infinities
  uint8_t bits;
};

template <typename Number>
constexpr bool kHasScales = std::is_same_v<Number, int8_t> || std::is_same_v<Number, Float8>;

// Quantised value of a vector's largest element.
template <typename Number>
constexpr float kLargest = std::is_same_v<Number, Float8> ? 448.0f : 127.0f;

// What `load` divides elements by.
template <typename Number>
constexpr float kLoadedUnit = std::is_same_v<Number, Float8> ? 256.0f : 1.0f;

// Load W elements, divided by 256, as the bits of a half with the same sign, exponent and mantissa stand for them. NaN
// becomes a number: the scale of such a vector is NaN.
template <int W>
inline F<W> load(const Float8* from) {
#ifdef __AVX512F__
  if constexpr (W == 16) {
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)), 7);
    return (F<W>)_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
  }
#endif
#ifdef __F16C__
  if constexpr (W == 8) {
    const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)from)), 7);
    return (F<W>)_mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
  }
#endif
  // Normal numbers get a float's bias; those below 2^-6 are multiples of 2^-9.
  const I<W> bits = widen<W>(&from->bits), magnitude = bits & 0x7f;
  const I<W> normal = (magnitude << 20) + (112 << 23);
  const I<W> denormal = bits_of<I<W>>(to_floats<W>(magnitude) * 7.62939453125e-6f);  // 2^-17
  return bits_of<F<W>>((magnitude < 8 ? denormal : normal) | (bits & 0x80) << 24);
}

// Round elements of at most `kLargest` to nearest even; the low byte of each lane is the result.
template <typename Number, int W>
inline I<W> quantized(const F<W>& x) {
  const float round_bias = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  if constexpr (std::is_same_v<Number, int8_t>) {
    return bits_of<I<W>>(x + round_bias);
  } else {
    const I<W> bits = bits_of<I<W>>(x), magnitude = bits & 0x7fffffff;
    const I<W> normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    const I<W> denormal = bits_of<I<W>>(bits_of<F<W>>(magnitude) * 512.0f + round_bias) & 15;  // multiples of 2^-9
    return (magnitude < bits_of<int32_t>(0.015625f) ? denormal : normal) | (bits >> 24 & 0x80);
  }
}

// Return the least bfloat16 that is not below a positive number.
inline BFloat16 rounded_up(float value) {
  return {static_cast<uint16_t>((bits_of<uint32_t>(value) + 0xffff) >> 16)};
}

// Write a vector to elements that are `stride` apart and return its scale, NaN if any element is not finite.
template <typename Number>
inline BFloat16 quantize(const float* x, int64_t head_dim, Number* to, int64_t stride) {
  constexpr int W = 4;
  F<W> largest = {}, broken = {};
  for (int64_t h = 0; h < head_dim; h += W) {
    const F<W> some = load<W>(x + h);
    largest = max<W>(largest, max<W>(some, -some));
    broken += some * 0.0f;  // NaN if any element is not finite
  }
  const float is_broken = sum_lanes<W>(broken);
  const float wanted = std::max(max_lanes<W>(largest) * (1.0f / kLargest<Number>), std::numeric_limits<float>::min());
  const BFloat16 scale = is_broken == 0.0f ? rounded_up(wanted) : rounded(is_broken);
  const float inverse = 1.0f / to_float(scale);
  const F<W> bound = all<W>(kLargest<Number>);
  for (int64_t h = 0; h < head_dim; h += W) {
    const F<W> exact = load<W>(x + h) * inverse;
    const F<W> bounded = exact > -bound ? (exact < bound ? exact : bound) : -bound;
    const I<W> elements = quantized<Number, W>(bounded);
    for (int i = 0; i < W; ++i, to += stride) {
      const uint8_t byte = static_cast<uint8_t>(elements[i]);
      std::memcpy(to, &byte, 1);
    }
  }
  return scale;
}

}  // namespace NATIVE_ISA
