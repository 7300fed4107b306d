// Vectors of int4 pools, in groups: see pallas_kernels/ragged_paged_attention/int4.py. A group of G elements is G / 2
// bytes, each with elements i and i + G / 2, then the size of a step and the least element as bfloat16.

#pragma once

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace NATIVE_ISA {

constexpr float kInt4Steps = 15.0f;

struct Nibbles {  // two elements
  uint8_t bits;
};

inline int64_t hadamard_block(int64_t head_dim) { return head_dim & -head_dim; }

// Multiply each block of a vector by the Hadamard matrix of ones and minus ones.
inline void hadamard(float* x, int64_t head_dim) {
  const int64_t block = hadamard_block(head_dim);
  for (int64_t half = 1; half < block; half *= 2) {
    for (int64_t first = 0; first < head_dim; first += 2 * half) {
      for (int64_t i = first; i < first + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
}

// Write a rotated vector as bytes that are `stride` apart.
inline void pack_int4(const float* x, int64_t head_dim, Nibbles* to, int64_t stride) {
  constexpr int W = 4;
  const int64_t size = native::int4_group(head_dim), half = size / 2;
  const auto write = [&](unsigned byte) {
    to->bits = static_cast<uint8_t>(byte);
    to += stride;
  };
  for (int64_t first = 0; first < head_dim; first += size, x += size) {
    F<W> smallest = load<W>(x), largest = smallest, broken = {};
    for (int64_t i = 0; i < size; i += W) {
      const F<W> some = load<W>(x + i);
      smallest = -max<W>(-smallest, -some);
      largest = max<W>(largest, some);
      broken += some * 0.0f;  // NaN if any element is not finite
    }
    const BFloat16 least = rounded(-max_lanes<W>(-smallest));
    const float base = to_float(least), is_broken = sum_lanes<W>(broken);
    const float wanted = (max_lanes<W>(largest) - base) * (1.0f / kInt4Steps);
    const BFloat16 step = rounded(is_broken == 0.0f ? std::max(wanted, std::numeric_limits<float>::min()) : is_broken);
    const float inverse = 1.0f / to_float(step);
    const float round_bias = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    for (int64_t i = 0; i < half; i += W) {
      const auto elements = [&](const float* from) {
        const F<W> exact = (load<W>(from) - base) * inverse;
        const F<W> bounded = exact > 0 ? (exact < kInt4Steps ? exact : all<W>(kInt4Steps)) : F<W>{};  // 0 for NaN
        return bits_of<I<W>>(bounded + round_bias);
      };
      const I<W> low = elements(x + i), high = elements(x + half + i);
      for (int j = 0; j < W; ++j) write((low[j] & 15) | (high[j] & 15) << 4);
    }
    for (const BFloat16 number : {step, least}) write(number.bits & 0xff), write(number.bits >> 8);
  }
}

// Load W bfloat16 whose bytes are in two rows.
template <int W>
inline F<W> load_split(const Nibbles* low, const Nibbles* high) {
  return bits_of<F<W>>(widen<W>(&low->bits) << 16 | widen<W>(&high->bits) << 24);
}

// Write the elements that W keys stand for, rows of `page_size` bytes in a page, to rows of `to_stride` floats.
template <int W>
void unpack_keys(const Nibbles* from, int64_t page_size, int64_t head_dim, float* to, int64_t to_stride) {
  const int64_t size = native::int4_group(head_dim), half = size / 2;
  for (int64_t first = 0; first < head_dim; first += size) {
    const Nibbles* numbers = from + half * page_size;
    const F<W> step = load_split<W>(numbers, numbers + page_size);
    const F<W> least = load_split<W>(numbers + 2 * page_size, numbers + 3 * page_size);
    for (int64_t i = 0; i < half; ++i, from += page_size) {
      const I<W> bytes = widen<W>(&from->bits);
      store<W>(to + (first + i) * to_stride, fma<W>(to_floats<W>(bytes & 15), step, least));
      store<W>(to + (first + half + i) * to_stride, fma<W>(to_floats<W>(bytes >> 4), step, least));
    }
    from += native::kInt4Numbers * page_size;
  }
}

// Write the elements that a value stands for.
template <int W>
void unpack_value(const Nibbles* from, int64_t head_dim, float* to) {
  const int64_t size = native::int4_group(head_dim), half = size / 2;
  for (int64_t first = 0; first < head_dim; first += size, to += size) {
    uint32_t numbers;  // the step's bits, then those of the least element
    std::memcpy(&numbers, from + half, sizeof(numbers));
    const F<W> step = all<W>(bits_of<float>(numbers << 16)), least = all<W>(bits_of<float>(numbers & 0xffff0000));
    for (int64_t i = 0; i < half; i += W) {
      const I<W> bytes = widen<W>(&from[i].bits);
      store<W>(to + i, fma<W>(to_floats<W>(bytes & 15), step, least));
      store<W>(to + half + i, fma<W>(to_floats<W>(bytes >> 4), step, least));
    }
    from += half + native::kInt4Numbers;
  }
}

}  // namespace NATIVE_ISA
