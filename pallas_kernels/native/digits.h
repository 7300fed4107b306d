// Products by integer arithmetic, for processors that multiply bytes: 64 products and their sums are one instruction
// (VNNI), where float arithmetic has three instructions for 16 products.
//
// A block of up to 128 columns of a token becomes integers of 24 bits times a power of two, and an integer three signed
// bytes, its digits: x = (d[0] + 2^8 d[1] + 2^16 d[2]) * factor. The largest integer is about 2^22 or more, so that an
// input's error is at most about 2^-23 of the largest in its block. Elements of a matrix, shifted to unsigned bytes, are
// multiplied with each digit. These sums are exact; as floats they are scaled and added to the output, block after block,
// in the same order however tokens are cut into tiles. A block with an input that is not finite makes all outputs of its
// token NaN.

#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "products.h"

#ifdef __AVX512VNNI__

namespace NATIVE_ISA {

constexpr int kDigits = 3;
constexpr int kChunkColumns = 4;  // columns whose products one instruction adds to a lane
constexpr int kChunkWords = 4;  // a word of these columns' digits for each, and an empty one
constexpr int64_t kDigitColumns = 128;  // most columns of a block: 128 * 2^23 fits an int32
constexpr int64_t kScalesAhead = 512;  // bytes of scales that are fetched ahead
constexpr int kMaxDigitTokens = 8;  // tokens of a tile, as many as the registers hold three sums of

// What else is known of a block of one token. Sums start from what the shift of elements would add to them.
struct DigitBlock {
  int32_t starts[kDigits];
  float factor;
  float sum;  // of the inputs
};

// Digits of one tile as [chunks, num_tokens, kChunkWords], and its blocks as [blocks, num_tokens].
struct DigitTile {
  const int32_t* digits;
  const DigitBlock* blocks;
  int64_t first_token;
  int num_tokens;
};

// A format of words has
//   kElementColumns, kChunks: the columns and the chunks in a word
//   kShift: what is added to elements to make them unsigned
//   bytes(words, chunk): the elements of a chunk
//   arranged(columns): 16 columns in the order of the chunks
struct Int8Digits {
  using Weight = uint32_t;
  static constexpr int kElementColumns = 4, kChunks = 1, kShift = 128;
  static constexpr bool kHasZeros = false;

  static inline NATIVE_INLINE __m512i bytes(const I<16>& words, int) {
    return _mm512_xor_si512((__m512i)words, _mm512_set1_epi8(-128));
  }

  static inline __m512i arranged(__m512i columns) { return columns; }
};

// The chunks are the even columns of a word and the odd ones.
struct Int4Digits {
  using Weight = uint32_t;
  static constexpr int kElementColumns = 8, kChunks = 2, kShift = 8;
  static constexpr bool kHasZeros = true;

  static inline NATIVE_INLINE __m512i bytes(const I<16>& words, int chunk) {
    const __m512i shifted = chunk == 0 ? (__m512i)words : _mm512_srli_epi32((__m512i)words, 4);
    return _mm512_and_si512(shifted, _mm512_set1_epi8(15));
  }

  static inline __m512i arranged(__m512i columns) {
    const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    return _mm512_permutexvar_epi32(order, columns);
  }
};

// Call use(i) for i in [0, N) without a loop: compilers keep arrays in registers only if every index is a constant.
template <int... I, typename Use>
inline NATIVE_INLINE void unrolled(std::integer_sequence<int, I...>, const Use& use) {
  (use(I), ...);
}

template <int N, typename Use>
inline NATIVE_INLINE void unrolled(const Use& use) {
  unrolled(std::make_integer_sequence<int, N>{}, use);
}

// Sizes of a matrix's groups of columns: each is some words of a row and some blocks, whose last may be shorter.
template <typename Format>
struct DigitGroups {
  static constexpr int64_t kBlockWords = kDigitColumns / Format::kElementColumns;
  int64_t num_groups, words, blocks;

  explicit DigitGroups(const LinearProblem& p)
      : num_groups(p.num_inputs / p.group_size),
        words(group_elements<Format>(p.group_size)),
        blocks((words + kBlockWords - 1) / kBlockWords) {}

  int64_t num_words() const { return num_groups * words; }
  int64_t num_blocks() const { return num_groups * blocks; }
  int64_t words_of(int64_t index) const { return std::min(kBlockWords, words - index * kBlockWords); }
};

// Write the digits of `size` columns of one token, to chunks that are `stride` apart.
template <typename Format>
inline void write_digits(const float* x, int64_t size, int64_t num_chunks, int32_t* to, int64_t stride,
                         DigitBlock& block) {
  constexpr int W = 16;
  I<W> most = {};
  for (int64_t k = 0; k < size; k += W) {
    const I<W> magnitude = bits_of<I<W>>(load_some<W>(x + k, size - k)) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  // The largest integer has digits if its magnitude is below 2^23 - 2^15 - 2^7; factors below 2^-126 would be zeros.
  const uint32_t largest = _mm512_reduce_max_epi32((__m512i)most);
  const uint32_t exponent = std::max<uint32_t>((largest + 0x10200) >> 23, 23);
  const float inverse = bits_of<float>((276 - exponent) << 23);
  const bool is_finite = largest < 0x7f800000;
  block.factor = is_finite ? bits_of<float>((exponent - 22) << 23) : std::numeric_limits<float>::quiet_NaN();

  // In a sum with 2^7 in each digit, digits are unsigned, and flipping their highest bits takes it away again.
  const __m512i sevens = _mm512_set1_epi32(0x808080);
  const __m512i transposed = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
  __m512i sums = _mm512_setzero_si512();
  for (int64_t k = 0, chunk = 0; chunk < num_chunks; k += W, chunk += W / kChunkColumns) {
    const F<W> scaled = load_some<W>(x + k, size - k) * inverse;
    const __m512i sum = _mm512_add_epi32(_mm512_cvtps_epi32((__m512)scaled), sevens);
    const __m512i digits = _mm512_shuffle_epi8(Format::arranged(_mm512_xor_si512(sum, sevens)), transposed);
    sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), digits);
    int32_t words[W];
    std::memcpy(words, &digits, sizeof(words));
    for (int64_t i = 0; i < std::min<int64_t>(W / kChunkColumns, num_chunks - chunk); ++i, to += stride) {
      std::memcpy(to, words + i * kChunkWords, sizeof(int32_t) * kChunkWords);
    }
  }
  const I<W> lanes = (I<W>)sums;
  int32_t total = 0;
  for (int d = 0; d < kDigits; ++d) {
    const int32_t digits = lanes[d] + lanes[d + 4] + lanes[d + 8] + lanes[d + 12];
    block.starts[d] = -Format::kShift * digits;
    total += digits << 8 * d;
  }
  block.sum = static_cast<float>(total) * block.factor;
}

// All tokens cut into tiles, as digits in a buffer of `size(p)` floats.
template <typename WeightFormat>
class DigitTokens {
 public:
  using Format = WeightFormat;

  static int64_t size(const LinearProblem& p) {
    const DigitGroups<Format> groups(p);
    return p.num_tokens * (token_words(groups) + groups.num_blocks() * int64_t{sizeof(DigitBlock) / sizeof(float)});
  }

  DigitTokens(Executor& executor, const LinearProblem& p, float* buffer)
      : p_(p), groups_(p), tiles_(p.num_tokens, kMaxDigitTokens), digits_(reinterpret_cast<int32_t*>(buffer)) {
    blocks_ = reinterpret_cast<DigitBlock*>(digits_ + p.num_tokens * token_words(groups_));
    tiles_.pack_all(executor, p.num_inputs, [&](int64_t i) { pack(i); });
  }

  int64_t num_tiles() const { return tiles_.size(); }

  DigitTile tile(int64_t index) const {
    const int64_t first = tiles_.start(index);
    return {digits_ + first * token_words(groups_), blocks_ + first * groups_.num_blocks(), first,
            static_cast<int>(tiles_.start(index + 1) - first)};
  }

 private:
  static int64_t token_words(const DigitGroups<Format>& groups) {
    return groups.num_words() * Format::kChunks * kChunkWords;
  }

  void pack(int64_t index) const {
    const int64_t first = tiles_.start(index), num_tokens = tiles_.start(index + 1) - first;
    struct Prepared;
    float* buffer = scratch<Prepared>(p_.num_inputs);
    for (int64_t t = 0; t < num_tokens; ++t) {
      const float* x = prepare(p_, first + t, buffer);
      int32_t* to = digits_ + first * token_words(groups_) + t * kChunkWords;
      DigitBlock* block = blocks_ + first * groups_.num_blocks() + t;
      for (int64_t group = 0; group < groups_.num_groups; ++group, x += p_.group_size) {
        for (int64_t i = 0; i < groups_.blocks; ++i, block += num_tokens) {
          const int64_t size = std::min(kDigitColumns, p_.group_size - i * kDigitColumns);
          const int64_t num_chunks = groups_.words_of(i) * Format::kChunks, stride = num_tokens * kChunkWords;
          write_digits<Format>(x + i * kDigitColumns, size, num_chunks, to, stride, *block);
          to += num_chunks * stride;
        }
      }
    }
  }

  const LinearProblem& p_;
  DigitGroups<Format> groups_;
  Tiles tiles_;
  int32_t* digits_;
  DigitBlock* blocks_;
};

// A range of a row's blocks.
struct DigitRange {
  int64_t first, end;
};

// Add the products of a chunk with one digit of its columns. GCC 12 copies and spills sums if it sees the additions.
template <int Panels>
inline NATIVE_INLINE void add_products(__m512i (&sums)[Panels], const __m512i (&bytes)[Panels], const int32_t& digit) {
  if constexpr (Panels == 1) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums[0]) : "v"(bytes[0]), "m"(digit));
  } else {
    const __m512i digits = _mm512_set1_epi32(digit);
    for (int v = 0; v < Panels; ++v) asm("vpdpbusd %2, %1, %0" : "+v"(sums[v]) : "v"(bytes[v]), "v"(digits));
  }
}

// Return how many elements ahead to fetch, with `left` of them to the end of a panel. Behind it are panels that are
// read at once with it: what follows them all is fetched.
template <int Panels>
inline int64_t ahead(int64_t left, int64_t stride, int64_t bytes) {
  const int64_t size = bytes / int64_t{sizeof(uint32_t)};
  return left <= size ? size + (Panels - 1) * stride : size;
}

// Fetch scales and zero points that are needed some groups later.
template <int Panels>
inline NATIVE_INLINE void fetch_scales(const LinearProblem& p, int64_t panel, int64_t group, int64_t num_groups) {
  const int64_t stride = num_groups * kPanelRows;
  const int64_t done = group * kPanelRows;
  const int64_t at = panel * stride + done + ahead<Panels>(stride - done, stride, kScalesAhead);
  for (int v = 0; v < Panels; ++v) {
    __builtin_prefetch(p.scales + at + v * stride);
    if (p.zeros) __builtin_prefetch(p.zeros + at + v * stride);
  }
}

// Add the products of some blocks to a tile's sums [Tokens, Panels] in `kept`, and write y after the last block.
template <typename Format, int Tokens, int Panels, bool FromMemory>
void multiply_digits(const LinearProblem& p, const DigitTile& tile, int64_t panel, DigitRange range, float* kept) {
  constexpr int W = 16;
  const DigitGroups<Format> groups(p);
  const int64_t stride = groups.num_words() * kPanelRows;
  int64_t group = range.first / groups.blocks, index = range.first % groups.blocks;
  const int64_t first_word = group * groups.words + index * groups.kBlockWords;
  const auto* from = static_cast<const uint32_t*>(p.weight) + panel * stride + first_word * kPanelRows;
  const uint32_t* end = static_cast<const uint32_t*>(p.weight) + (panel + 1) * stride;
  const int32_t* digits = tile.digits + first_word * Format::kChunks * Tokens * kChunkWords;
  F<W> sums[Tokens][Panels] = {};
  if (range.first > 0) {
    for (int t = 0; t < Tokens; ++t) {
      for (int v = 0; v < Panels; ++v) sums[t][v] = load<W>(kept + (t * Panels + v) * W);
    }
  }
  for (int64_t i = range.first; i < range.end; ++i) {
    const DigitBlock* block = tile.blocks + i * Tokens;
    __m512i parts[kDigits][Tokens][Panels];
    unrolled<Tokens>([&](int t) NATIVE_INLINE {
      for (int d = 0; d < kDigits; ++d) {
        for (int v = 0; v < Panels; ++v) parts[d][t][v] = _mm512_set1_epi32(block[t].starts[d]);
      }
    });
    const uint32_t* fetched = from + ahead<Panels>(end - from, stride, kPrefetchBytes);
    if constexpr (FromMemory) fetch_scales<Panels>(p, panel, group, groups.num_groups);
    for (int64_t left = groups.words_of(index); left > 0; --left, from += kPanelRows, fetched += kPanelRows) {
      I<W> words[Panels];
      for (int v = 0; v < Panels; ++v) words[v] = load_words<W>(from + v * stride);
      if constexpr (FromMemory) {
        for (int v = 0; v < Panels; ++v) __builtin_prefetch(fetched + v * stride);
      }
      for (int c = 0; c < Format::kChunks; ++c) {
        __m512i bytes[Panels];
        for (int v = 0; v < Panels; ++v) bytes[v] = Format::bytes(words[v], c);
        unrolled<Tokens>([&](int t) NATIVE_INLINE {
          for (int d = 0; d < kDigits; ++d) add_products(parts[d][t], bytes, digits[t * kChunkWords + d]);
        });
        digits += Tokens * kChunkWords;
      }
    }
    const GroupScales<Panels> scales(p, p.zeros != nullptr, panel, group);
    unrolled<Tokens>([&](int t) NATIVE_INLINE {
      for (int v = 0; v < Panels; ++v) {
        const I<W> low = (I<W>)parts[0][t][v] + ((I<W>)parts[1][t][v] << 8);
        F<W> sum = fma<W>(to_floats<W>((I<W>)parts[2][t][v]), all<W>(65536.0f), to_floats<W>(low)) * block[t].factor;
        if (p.zeros) sum = fma<W>(all<W>(-block[t].sum), scales.zeros[v] - static_cast<float>(Format::kShift), sum);
        sums[t][v] = fma<W>(scales.scales[v], sum, sums[t][v]);
      }
    });
    if (++index == groups.blocks) index = 0, ++group;
  }
  if (range.end == groups.num_blocks()) return finish<Tokens, Panels>(p, tile.first_token, panel, sums);
  for (int t = 0; t < Tokens; ++t) {
    for (int v = 0; v < Panels; ++v) store<W>(kept + (t * Panels + v) * W, sums[t][v]);
  }
}

using MultiplyDigits = void (*)(const LinearProblem&, const DigitTile&, int64_t, DigitRange, float*);
using ByDigitTokens = std::array<MultiplyDigits, kMaxDigitTokens>;
using DigitTokenCounts = std::make_integer_sequence<int, kMaxDigitTokens>;

// Return the panels that a lone tile works on at once.
constexpr int lone_digit_panels(int num_tokens) { return num_tokens == 1 ? 4 : num_tokens <= 4 ? 2 : 1; }

template <typename Format, int... I>
constexpr ByDigitTokens lone_digit_tiles(std::integer_sequence<int, I...>) {
  return {multiply_digits<Format, I + 1, lone_digit_panels(I + 1), true>...};
}

template <typename Format, bool FromMemory, int... I>
constexpr ByDigitTokens digit_tiles_of_one_panel(std::integer_sequence<int, I...>) {
  return {multiply_digits<Format, I + 1, 1, FromMemory>...};
}

// Multiply a lone tile with a range of panels.
template <typename Format>
void multiply_panels(const LinearProblem& p, const DigitTokens<Format>& tokens, int64_t panel, int64_t end_panel) {
  static constexpr auto several = lone_digit_tiles<Format>(DigitTokenCounts{});
  static constexpr auto single = digit_tiles_of_one_panel<Format, true>(DigitTokenCounts{});
  const DigitTile tile = tokens.tile(0);
  const DigitRange all_blocks{0, DigitGroups<Format>(p).num_blocks()};
  const int num_panels = lone_digit_panels(tile.num_tokens);
  for (; panel + num_panels <= end_panel; panel += num_panels) {
    several[tile.num_tokens - 1](p, tile, panel, all_blocks, nullptr);
  }
  for (; panel < end_panel; ++panel) single[tile.num_tokens - 1](p, tile, panel, all_blocks, nullptr);
}

// Multiply some tiles with a range of panels. A block of some panels stays in the first-level cache while all tiles
// pass, and the sums wait in the second-level cache between blocks.
template <typename Format>
void multiply_blocks(const LinearProblem& p, const DigitTokens<Format>& tokens, int64_t first_tile, int64_t end_tile,
                     int64_t first_panel, int64_t end_panel) {
  static constexpr auto from_memory = digit_tiles_of_one_panel<Format, true>(DigitTokenCounts{});
  static constexpr auto from_cache = digit_tiles_of_one_panel<Format, false>(DigitTokenCounts{});
  constexpr int64_t kTileSums = kMaxDigitTokens * kPanelRows;
  const DigitGroups<Format> groups(p);
  const int64_t num_blocks = groups.num_blocks();
  const int64_t step = std::max<int64_t>(1, kDigitColumns * num_blocks / p.num_inputs);  // about 128 columns
  struct Sums;
  float* sums = scratch<Sums>(step < num_blocks ? kGroupPanels * (end_tile - first_tile) * kTileSums : 0);
  for (int64_t panels = first_panel; panels < end_panel; panels += kGroupPanels) {
    for (int64_t block = 0; block < num_blocks; block += step) {
      const DigitRange range{block, std::min(block + step, num_blocks)};
      float* kept = sums;
      for (int64_t i = first_tile; i < end_tile; ++i) {
        const DigitTile tile = tokens.tile(i);
        const auto& by_tokens = i == first_tile ? from_memory : from_cache;
        for (int64_t panel = panels; panel < std::min(panels + kGroupPanels, end_panel); ++panel, kept += kTileSums) {
          by_tokens[tile.num_tokens - 1](p, tile, panel, range, kept);
        }
      }
    }
  }
}

}  // namespace NATIVE_ISA

#endif
