// Vectors of W floats in the compiler's own vector types, so that one source serves AVX2, AVX-512 and NEON.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "kernels.h"

#define NATIVE_INLINE __attribute__((always_inline))

namespace NATIVE_ISA {

// Call use(i) for i in [0, N) without a loop: compilers keep arrays in registers only if every index is a constant.
template <int... I, typename Use>
inline NATIVE_INLINE void unrolled(std::integer_sequence<int, I...>, const Use& use) {
  (use(I), ...);
}

template <int N, typename Use>
inline NATIVE_INLINE void unrolled(const Use& use) {
  unrolled(std::make_integer_sequence<int, N>{}, use);
}

// Call use(i, j) for i in [0, N) and j in [0, M) without a loop.
template <int N, int M, typename Use>
inline NATIVE_INLINE void unrolled_pairs(const Use& use) {
  unrolled<N>([&](int i) NATIVE_INLINE { unrolled<M>([&](int j) NATIVE_INLINE { use(i, j); }); });
}

template <int W>
struct Simd {
  typedef float F __attribute__((vector_size(4 * W)));
  typedef int32_t I __attribute__((vector_size(4 * W)));
};

template <int W>
using F = typename Simd<W>::F;
template <int W>
using I = typename Simd<W>::I;

template <typename To, typename From>
inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Load W elements of any storage type as floats.
template <int W>
inline F<W> load(const float* from) {
  F<W> to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

typedef uint32_t Unsigned4 __attribute__((vector_size(16)));

// Load 4 elements, each of them as often as it fits into a lane of 32 bits. Repeated in two steps, as SSE2 and NEON do.
template <typename To, typename Element>
inline To load_repeated(const Element* from) {
  typedef int8_t Bytes __attribute__((vector_size(16)));
  typedef int16_t Words __attribute__((vector_size(16)));
  typedef int64_t Halves __attribute__((vector_size(16)));
  int64_t half = 0;  // in a register: a vector would be written piecewise to memory first
  std::memcpy(&half, from, 4 * sizeof(Element));
  Words words = (Words)Halves{half, 0};
#ifdef __clang__
  if constexpr (sizeof(Element) == 1) {
    words = (Words)__builtin_shufflevector((Bytes)words, (Bytes)words, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  }
  return (To)__builtin_shufflevector(words, words, 0, 0, 1, 1, 2, 2, 3, 3);
#else
  if constexpr (sizeof(Element) == 1) {
    constexpr Bytes kTwice = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    words = (Words)__builtin_shuffle((Bytes)words, (Bytes)words, kTwice);
  }
  return (To)__builtin_shuffle(words, words, Words{0, 8, 1, 9, 2, 10, 3, 11});
#endif
}

// GCC 12 converts lane by lane when asked through its vector types, hence the intrinsics and shifts.
template <int W>
inline I<W> widen(const int8_t* from) {
#ifdef __AVX512F__
  if constexpr (W == 16) return (I<W>)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#endif
#ifdef __AVX2__
  if constexpr (W == 8) return (I<W>)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#endif
  if constexpr (W == 4) return load_repeated<I<4>>(from) >> 24;
  I<W> to;
  for (int i = 0; i < W; ++i) to[i] = from[i];
  return to;
}

template <int W>
inline I<W> widen(const uint8_t* from) {
#ifdef __AVX512F__
  if constexpr (W == 16) return (I<W>)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#endif
#ifdef __AVX2__
  if constexpr (W == 8) return (I<W>)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#endif
  if constexpr (W == 4) return (I<4>)(load_repeated<Unsigned4>(from) >> 24);
  I<W> to;
  for (int i = 0; i < W; ++i) to[i] = from[i];
  return to;
}

template <int W>
inline I<W> widen(const uint16_t* from) {
#ifdef __AVX512F__
  if constexpr (W == 16) return (I<W>)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#endif
#ifdef __AVX2__
  if constexpr (W == 8) return (I<W>)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#endif
  if constexpr (W == 4) return (I<4>)(load_repeated<Unsigned4>(from) >> 16);
  I<W> to;
  for (int i = 0; i < W; ++i) to[i] = from[i];
  return to;
}

template <int W>
inline F<W> load(const int8_t* from) {
  return __builtin_convertvector(widen<W>(from), F<W>);
}

// Element types that C++ has no names for.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <int W>
inline F<W> load(const BFloat16* from) {
  return bits_of<F<W>>(widen<W>(&from->bits) << 16);
}

template <int W>
inline F<W> load(const Float16* from) {
#ifdef __AVX512F__
  if constexpr (W == 16) return (F<W>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#endif
#ifdef __F16C__
  if constexpr (W == 8) return (F<W>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#endif
  // Normal numbers get a float's bias, infinities and NaNs a float's largest exponent. Denormals are multiples of 2^-24:
  // converted as integers, since threads of XLA take denormal floats for zeros.
  const I<W> bits = widen<W>(&from->bits), magnitude = bits & 0x7fff;
  const I<W> normal = (magnitude << 13) + 0x38000000, infinite = magnitude << 13 | 0x7f800000;
  const I<W> denormal = bits_of<I<W>>(__builtin_convertvector(magnitude, F<W>) * 5.9604644775390625e-8f);
  const I<W> finite = magnitude < 0x400 ? denormal : normal;
  return bits_of<F<W>>((magnitude < 0x7c00 ? finite : infinite) | (bits & 0x8000) << 16);
}

template <int W>
inline void store(float* to, const F<W>& from) {
  std::memcpy(to, &from, sizeof(from));
}

inline void store_one(float* to, float value) { *to = value; }

// Round to nearest even; a NaN stays a NaN.
inline void store_one(BFloat16* to, float value) {
  uint32_t bits = bits_of<uint32_t>(value);
  const bool is_nan = value != value;
  bits += 0x7fff + ((bits >> 16) & 1);
  to->bits = is_nan ? 0x7fc0 : static_cast<uint16_t>(bits >> 16);
}

inline float to_float(float number) { return number; }
inline float to_float(BFloat16 number) { return bits_of<float>(static_cast<uint32_t>(number.bits) << 16); }

// Round to bfloat16.
inline BFloat16 rounded(float value) {
  BFloat16 to;
  store_one(&to, value);
  return to;
}

// Round floats to bfloat16 as `store_one` does.
template <int W>
inline F<W> rounded_to_bfloat16(const F<W>& values) {
  const I<W> bits = bits_of<I<W>>(values), even = bits >> 16 & 1;
  return values == values ? bits_of<F<W>>((bits + 0x7fff + even) & ~0xffff) : values;
}

// Round floats to bfloat16 as `store_one` does, and store them.
template <int W>
inline void store(BFloat16* to, const F<W>& from) {
  const I<W> bits = bits_of<I<W>>(rounded_to_bfloat16<W>(from));
#ifdef __AVX512F__
  if constexpr (W == 16) {
    return _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)bits, 16)));
  }
#endif
#ifdef __AVX2__
  if constexpr (W == 8) {
    const __m256i words = _mm256_srli_epi32((__m256i)bits, 16);
    return _mm_storeu_si128((__m128i*)to, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
#endif
  for (int i = 0; i < W; ++i) to[i].bits = static_cast<uint16_t>(static_cast<uint32_t>(bits[i]) >> 16);
}

// Load the first `size` of W floats, or all; the rest are zeros.
template <int W, typename Number>
inline F<W> load_some(const Number* from, int64_t size) {
  if (size >= W) return load<W>(from);
  F<W> to = {};
  for (int64_t i = 0; i < size; ++i) to[i] = to_float(from[i]);
  return to;
}

template <int W, typename Number>
inline void store_some(Number* to, const F<W>& from, int64_t size) {
  if (size >= W) return store<W>(to, from);
  for (int64_t i = 0; i < size; ++i) store_one(to + i, from[i]);
}

// Load some of W activations from an element on, as `load_some` does.
template <int W>
inline F<W> load_some(const native::Activations& from, int64_t element, int64_t size) {
  if (from.is_bfloat16) return load_some<W>(static_cast<const BFloat16*>(from.data) + element, size);
  return load_some<W>(static_cast<const float*>(from.data) + element, size);
}

template <int W>
inline void store_some(const native::Activations& to, int64_t element, const F<W>& from, int64_t size) {
  if (to.is_bfloat16) return store_some<W>(static_cast<BFloat16*>(to.data) + element, from, size);
  store_some<W>(static_cast<float*>(to.data) + element, from, size);
}

// Set `size` activations from an element on to zero.
inline void fill_with_zeros(const native::Activations& to, int64_t element, int64_t size) {
  std::memset(to.from(element).data, 0, size * (to.is_bfloat16 ? sizeof(BFloat16) : sizeof(float)));
}

template <int W>
inline F<W> all(float value) {
  return value - F<W>{};  // not a sum, for which compilers add, as 0 + -0 is 0
}

// Return a * b + c, rounded once where the processor can.
template <int W>
inline F<W> fma(const F<W>& a, const F<W>& b, const F<W>& c) {
#ifdef __AVX512F__
  if constexpr (W == 16) return (F<W>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#ifdef __FMA__
  if constexpr (W == 8) return (F<W>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  if constexpr (W == 4) return (F<W>)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#endif
  return a * b + c;
}

template <int W>
inline I<W> load_words(const uint32_t* from) {
  I<W> to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

// Convert integers to floats.
template <int W>
inline F<W> to_floats(const I<W>& from) {
  return __builtin_convertvector(from, F<W>);
}

// Move a byte of each word to its highest; the others become zeros.
template <int W, int Byte>
inline I<W> byte_on_top(const I<W>& words) {
  constexpr int32_t kTop = -(1 << 24);
  if constexpr (Byte == 3) return words & kTop;
#ifdef __AVX2__
  constexpr int k0 = static_cast<int>(0x00808080u | static_cast<unsigned>(Byte) << 24);  // 0x80 is a zero
  const __m128i bytes = _mm_setr_epi32(k0, k0 + (4 << 24), k0 + (8 << 24), k0 + (12 << 24));
#endif
#ifdef __AVX512BW__
  if constexpr (W == 16) return (I<W>)_mm512_shuffle_epi8((__m512i)words, _mm512_broadcast_i32x4(bytes));
#endif
#ifdef __AVX2__
  if constexpr (W == 8) return (I<W>)_mm256_shuffle_epi8((__m256i)words, _mm256_broadcastsi128_si256(bytes));
#endif
  return words << 8 * (3 - Byte) & kTop;
}

// Return lanes of two vectors of 4: lanes 0 to 3 are those of `a`, 4 to 7 those of `b`.
template <int I0, int I1, int I2, int I3>
inline F<4> shuffle(const F<4>& a, const F<4>& b) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, I0, I1, I2, I3);
#else
  return __builtin_shuffle(a, b, I<4>{I0, I1, I2, I3});
#endif
}

// Write the transpose of 4 rows of 4 floats, as rows `to_stride` floats apart.
inline void transpose4(float* to, int64_t to_stride, const float* a, const float* b, const float* c, const float* d) {
  const F<4> rows[] = {load<4>(a), load<4>(b), load<4>(c), load<4>(d)};
  const F<4> low[] = {shuffle<0, 4, 1, 5>(rows[0], rows[1]), shuffle<0, 4, 1, 5>(rows[2], rows[3])};
  const F<4> high[] = {shuffle<2, 6, 3, 7>(rows[0], rows[1]), shuffle<2, 6, 3, 7>(rows[2], rows[3])};
  store<4>(to, shuffle<0, 1, 4, 5>(low[0], low[1]));
  store<4>(to + to_stride, shuffle<2, 3, 6, 7>(low[0], low[1]));
  store<4>(to + 2 * to_stride, shuffle<0, 1, 4, 5>(high[0], high[1]));
  store<4>(to + 3 * to_stride, shuffle<2, 3, 6, 7>(high[0], high[1]));
}

template <int W>
inline F<W> max(const F<W>& a, const F<W>& b) {
  return a > b ? a : b;
}

// Reduce a vector: combine its two halves, then theirs, down to one lane.
template <int W, typename Combine>
inline float fold_lanes(const F<W>& x, const Combine& combine) {
  if constexpr (W == 1) {
    return x[0];
  } else {
    F<W / 2> halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return fold_lanes<W / 2>(combine(halves[0], halves[1]), combine);
  }
}

template <int W>
inline float sum_lanes(const F<W>& x) {
  return fold_lanes<W>(x, [](const auto& a, const auto& b) { return a + b; });
}

// Return the largest lane of integers.
template <int W>
inline int32_t max_lanes(const I<W>& x) {
  if constexpr (W == 1) {
    return x[0];
  } else {
    I<W / 2> halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return max_lanes<W / 2>(halves[0] > halves[1] ? halves[0] : halves[1]);
  }
}

template <int W>
inline float max_lanes(const F<W>& x) {
  return fold_lanes<W>(x, [](const auto& a, const auto& b) { return a > b ? a : b; });
}

// Return each lane's index.
template <int W>
inline I<W> lane_numbers() {
  I<W> numbers;
  for (int i = 0; i < W; ++i) numbers[i] = i;
  return numbers;
}

// Return every second lane from `First` on, first the lanes of `a`, then of `b`.
template <int W, int First, int... Lane>
inline NATIVE_INLINE F<W> every_second(const F<W>& a, const F<W>& b, std::integer_sequence<int, Lane...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (2 * Lane + First)...);
#else
  return __builtin_shuffle(a, b, I<W>{(2 * Lane + First)...});
#endif
}

// Return the largest lane of each vector; overwrites the vectors.
template <int W>
inline NATIVE_INLINE F<W> max_of_each(F<W> (&rows)[W]) {
  constexpr auto kLanes = std::make_integer_sequence<int, W>{};
  unrolled<4>([&](int level) NATIVE_INLINE {
    unrolled<W / 2>([&](int i) NATIVE_INLINE {
      if (i >= W >> (level + 1)) return;
      const F<W> a = rows[2 * i], b = rows[2 * i + 1];
      rows[i] = max<W>(every_second<W, 0>(a, b, kLanes), every_second<W, 1>(a, b, kLanes));
    });
  });
  return rows[0];
}

// Return e^x for x <= 0 within 2 ulp, and 0 below the range of normal floats. Cody and Waite's reduction, then the
// minimax polynomial of Cephes' expf.
template <int W>
inline F<W> exp_of_negative(const F<W>& x) {
  const float round_bias = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const F<W> clamped = x < -87.0f ? all<W>(-87.0f) : x;  // written so that a NaN stays a NaN
  const F<W> shifted = fma<W>(clamped, all<W>(1.44269504f), all<W>(round_bias));
  const F<W> n = shifted - round_bias;
  const F<W> r = fma<W>(n, all<W>(2.12194440e-4f), fma<W>(n, all<W>(-0.693359375f), clamped));
  F<W> p = all<W>(1.9875691500e-4f);
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = fma<W>(p, r, all<W>(factor));
  }
  p = fma<W>(p * r, r, r) + 1.0f;
  const I<W> power = (bits_of<I<W>>(shifted) - bits_of<int32_t>(round_bias) + 127) << 23;
  const F<W> result = p * bits_of<F<W>>(power);
  return x < -87.0f ? F<W>{} : result;
}

constexpr float kLog2E = 1.44269504f;

// Return 2^x for x <= 0 within 2 ulp, 1 for 0, and 0 for -inf; below the range of normal floats 0 or a denormal. Minimax
// polynomial on [-1/2, 1/2].
template <int W>
inline F<W> exp2_of_negative(const F<W>& x) {
  const auto power = [](const F<W>& r) NATIVE_INLINE {
    F<W> p = fma<W>(all<W>(1.326472731e-3f), r, all<W>(9.671512991e-3f));
    p = fma<W>(p, r, all<W>(5.550733581e-2f));
    p = fma<W>(p, r, all<W>(2.402224243e-1f));
    p = fma<W>(p, r, all<W>(6.931470037e-1f));
    return fma<W>(p, r, all<W>(1.0f));
  };
#ifdef __AVX512DQ__
  if constexpr (W == 16) {
    const F<W> r = (F<W>)_mm512_reduce_ps((__m512)x, 0);  // x minus the nearest integer
    return (F<W>)_mm512_scalef_ps((__m512)power(r), (__m512)(x - r));
  }
#endif
  const float round_bias = 12582912.0f;  // as in `exp_of_negative`; the shift below drops its own bits
  const F<W> clamped = x < -126.0f ? all<W>(-126.0f) : x;  // written so that a NaN stays a NaN
  const F<W> shifted = clamped + round_bias;
  const F<W> p = power(clamped - (shifted - round_bias));
  const F<W> result = bits_of<F<W>>(bits_of<I<W>>(p) + (bits_of<I<W>>(shifted) << 23));
  return x < -126.0f ? F<W>{} : result;
}

// Return x / (1 + e^-x) without overflow.
template <int W>
inline F<W> silu(const F<W>& x) {
  const F<W> decay = exp_of_negative<W>(x < 0 ? x : -x);
  return x * (x < 0 ? decay : all<W>(1.0f)) / (1.0f + decay);
}

}  // namespace NATIVE_ISA
