// Sums of products of bytes, as each instruction set has them: what digits.h needs of a processor. NATIVE_DIGITS is
// defined if the processor multiplies elements of 4 bits with three digits faster than as floats, NATIVE_INT8_DIGITS if
// those of 8 bits too.

#pragma once

#include <cmath>

#include "simd.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define NATIVE_DIGITS
#define NATIVE_INT8_DIGITS
#elif (defined(__AVX512VNNI__) && NATIVE_WIDTH == 16) || (defined(__AVXVNNI__) && NATIVE_WIDTH == 8)
#define NATIVE_DIGITS
#define NATIVE_INT8_DIGITS
#elif defined(__AVX512BW__) && NATIVE_WIDTH == 16
#define NATIVE_BYTE_PAIRS
#elif defined(__AVX2__) && NATIVE_WIDTH == 8
#define NATIVE_DIGITS
#define NATIVE_BYTE_PAIRS
#endif

namespace NATIVE_ISA {

// Words of a chunk: one of its columns' digits for each of D, and for three an empty one.
template <int D>
constexpr int kChunkWords = D == 1 ? 1 : 4;

// ProductSums are W lanes of sums, each of the products of four elements of a row with four digits, chunk after chunk.
//   most_chunks(largest): how many chunks they hold before they must be widened, of elements up to `largest`
//   kSignedElements: whether elements are signed bytes, else unsigned ones
#ifdef NATIVE_BYTE_PAIRS
// Lanes are pairs of 16 bits, each with two products, which elements of 8 bits would overflow.
constexpr int most_chunks(int largest) { return 32767 / (2 * 128 * largest); }
template <int W>
struct Pairs {
  typedef int16_t Vector __attribute__((vector_size(4 * W)));
};
template <int W>
using ProductSums = typename Pairs<W>::Vector;

template <int W>
inline I<W> widened(const ProductSums<W>& sums) {
#if NATIVE_WIDTH == 16
  return (I<W>)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#else
  return (I<W>)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#endif
}
#else
constexpr int most_chunks(int) { return 1 << 10; }
template <int W>
using ProductSums = I<W>;

template <int W>
inline I<W> widened(const ProductSums<W>& sums) {
  return sums;
}
#endif

#if defined(__ARM_FEATURE_DOTPROD)

constexpr bool kSignedElements = true;

// Add the products of a chunk of V vectors with the digits of one token.
template <int D, int V>
inline NATIVE_INLINE void add_products(ProductSums<4> (&sums)[D][V], const I<4> (&bytes)[V], const int32_t* digits) {
  const int8x16_t all_digits = vreinterpretq_s8_s32(D == 1 ? vld1q_dup_s32(digits) : vld1q_s32(digits));
  for (int v = 0; v < V; ++v) {
    const int8x16_t elements = (int8x16_t)bytes[v];
    sums[0][v] = (I<4>)vdotq_laneq_s32((int32x4_t)sums[0][v], elements, all_digits, 0);
    if constexpr (D == 3) {
      sums[1][v] = (I<4>)vdotq_laneq_s32((int32x4_t)sums[1][v], elements, all_digits, 1);
      sums[2][v] = (I<4>)vdotq_laneq_s32((int32x4_t)sums[2][v], elements, all_digits, 2);
    }
  }
}

inline I<4> nearest(const F<4>& x) { return (I<4>)vcvtnq_s32_f32((float32x4_t)x); }

// Transpose the 4 x 4 bytes of 4 words.
inline I<4> transposed_bytes(const I<4>& words) {
  const uint8x16_t order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return (I<4>)vqtbl1q_u8((uint8x16_t)words, order);
}

// Add the four bytes of each word to a lane.
inline I<4> add_bytes(const I<4>& sums, const I<4>& words) {
  return (I<4>)vdotq_s32((int32x4_t)sums, (int8x16_t)words, vdupq_n_s8(1));
}

// Replace each byte, from 0 to 15, by an entry of a table.
template <int W>
inline I<W> looked_up(const uint8_t (&table)[16], const I<W>& bytes) {
  return (I<W>)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)bytes);
}

#elif defined(__AVX2__)

constexpr bool kSignedElements = false;

// Add the products of a chunk of V vectors with the digits of one token. GCC 12 copies and spills sums if it sees the
// additions.
#if NATIVE_WIDTH == 16 && defined(NATIVE_INT8_DIGITS)

template <int D, int V>
inline NATIVE_INLINE void add_products(ProductSums<16> (&sums)[D][V], const I<16> (&bytes)[V], const int32_t* digits) {
  static_assert(V == 1, "several vectors would load the digits of a chunk several times");
  unrolled<D>([&](int d) NATIVE_INLINE {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums[d][0]) : "v"(bytes[0]), "m"(digits[d]));
  });
}

#elif defined(NATIVE_INT8_DIGITS)

template <int D, int V>
inline NATIVE_INLINE void add_products(ProductSums<8> (&sums)[D][V], const I<8> (&bytes)[V], const int32_t* digits) {
  unrolled<D>([&](int d) NATIVE_INLINE {
    const I<8> all_digits = digits[d] - I<8>{};
    unrolled<V>([&](int v) NATIVE_INLINE {
      asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums[d][v]) : "x"(bytes[v]), "x"(all_digits));
    });
  });
}

#else

// GCC 12 computes all products before it adds any, and spills sums, if it sees the instructions.
template <int D, int V>
inline NATIVE_INLINE void add_products(ProductSums<NATIVE_WIDTH> (&sums)[D][V], const I<NATIVE_WIDTH> (&bytes)[V],
                                       const int32_t* digits) {
  unrolled<D>([&](int d) NATIVE_INLINE {
    const I<NATIVE_WIDTH> all_digits = digits[d] - I<NATIVE_WIDTH>{};
    unrolled<V>([&](int v) NATIVE_INLINE {
      ProductSums<NATIVE_WIDTH> products;
      asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
          : "+v"(sums[d][v]), "=&v"(products)
          : "v"(bytes[v]), "v"(all_digits));
    });
  });
}

// Add the products of two columns in 16 bits each, of elements and digits.
template <int D, int V>
inline NATIVE_INLINE void add_products(I<NATIVE_WIDTH> (&sums)[D][V], const I<NATIVE_WIDTH> (&pairs)[V],
                                       const int32_t* digits) {
  unrolled<D>([&](int d) NATIVE_INLINE {
    const I<NATIVE_WIDTH> all_digits = digits[d] - I<NATIVE_WIDTH>{};
    unrolled<V>([&](int v) NATIVE_INLINE {
      I<NATIVE_WIDTH> products;
      asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
          : "+v"(sums[d][v]), "=&v"(products)
          : "v"(pairs[v]), "v"(all_digits));
    });
  });
}

template <int W>
inline I<W> widened(const I<W>& sums) {
  return sums;
}

#endif

inline I<4> nearest(const F<4>& x) { return (I<4>)_mm_cvtps_epi32((__m128)x); }

#if NATIVE_WIDTH == 16
inline I<16> nearest(const F<16>& x) { return (I<16>)_mm512_cvtps_epi32((__m512)x); }
#else
inline I<8> nearest(const F<8>& x) { return (I<8>)_mm256_cvtps_epi32((__m256)x); }
#endif

// Transpose the 4 x 4 bytes of 4 words.
inline I<4> transposed_bytes(const I<4>& words) {
  return (I<4>)_mm_shuffle_epi8((__m128i)words, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
}

// Add the four bytes of each word to a lane.
inline I<4> add_bytes(const I<4>& sums, const I<4>& words) {
  const __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), (__m128i)words);
  return sums + (I<4>)_mm_madd_epi16(pairs, _mm_set1_epi16(1));
}

// Replace each byte, from 0 to 15, by an entry of a table.
template <int W>
inline I<W> looked_up(const uint8_t (&table)[16], const I<W>& bytes) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
#if NATIVE_WIDTH == 16
  return (I<W>)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), (__m512i)bytes);
#else
  return (I<W>)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)bytes);
#endif
}

#else  // without products of bytes

constexpr bool kSignedElements = true;

template <int W>
inline I<W> signed_byte(const I<W>& words, int byte) {
  return words << (24 - 8 * byte) >> 24;
}

template <int D, int V>
inline NATIVE_INLINE void add_products(ProductSums<NATIVE_WIDTH> (&sums)[D][V], const I<NATIVE_WIDTH> (&bytes)[V],
                                       const int32_t* digits) {
  for (int d = 0; d < D; ++d) {
    for (int byte = 0; byte < 4; ++byte) {
      const int32_t digit = static_cast<int8_t>(digits[d] >> 8 * byte);
      for (int v = 0; v < V; ++v) sums[d][v] += signed_byte<NATIVE_WIDTH>(bytes[v], byte) * digit;
    }
  }
}

inline I<4> nearest(const F<4>& x) {
  I<4> to;
  for (int i = 0; i < 4; ++i) to[i] = static_cast<int32_t>(std::lrint(x[i]));
  return to;
}

inline I<4> transposed_bytes(const I<4>& words) {
  I<4> to = {};
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) to[i] |= (words[j] >> 8 * i & 0xff) << 8 * j;
  }
  return to;
}

inline I<4> add_bytes(const I<4>& sums, const I<4>& words) {
  return sums + signed_byte<4>(words, 0) + signed_byte<4>(words, 1) + signed_byte<4>(words, 2) + signed_byte<4>(words, 3);
}

template <int W>
inline I<W> looked_up(const uint8_t (&table)[16], const I<W>& bytes) {
  uint8_t elements[4 * W];
  std::memcpy(elements, &bytes, sizeof(elements));
  for (uint8_t& element : elements) element = table[element];
  I<W> to;
  std::memcpy(&to, elements, sizeof(to));
  return to;
}

#endif

}  // namespace NATIVE_ISA
