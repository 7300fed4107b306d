// Products by integer arithmetic, for processors that multiply bytes: one instruction has 64 or 32 products and sums of
// them (VNNI), or 16 (NEON), or two have 32 (AVX2), where float arithmetic has three for 16, 8 or 4.
//
// A block of up to 128 columns of a token becomes integers of 24 bits times a power of two, and an integer three signed
// bytes, its digits: x = (d[0] + 2^8 d[1] + 2^16 d[2]) * factor. The largest integer is about 2^22 or more, so that an
// input's error is at most about 2^-23 of the largest in its block. Elements of a matrix, shifted to unsigned bytes, are
// multiplied with each digit. These sums are exact; as floats they are scaled and added to the output, block after block,
// in the same order however tokens are cut into tiles. A block with an input that is not finite makes all outputs of its
// token NaN.
//
// Inputs that are rounded to int8 have one digit, and a block is a whole group of columns: x = d[0] * factor.

#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "bytes.h"
#include "products.h"

namespace NATIVE_ISA {

constexpr int64_t kDigitColumns = 128;  // most columns of a block with three digits: 128 * 2^23 fits an int32
constexpr int64_t kScalesAhead = 512;  // bytes of scales that are fetched ahead
constexpr int64_t kWordsAhead = 8192;  // bytes of a stream of words that are fetched ahead, from panel to panel
// Vectors of sums that the registers hold; few without products of bytes, which are slow anyway.
#if defined(NATIVE_INT8_DIGITS) || defined(NATIVE_BYTE_PAIRS)
constexpr int kDigitSums = NATIVE_WIDTH == 8 ? 12 : 24;
#else
constexpr int kDigitSums = 6;
#endif

// Places that words of a matrix come from.
enum class Source {
  kCache,   // the first-level cache
  kPasses,  // caches or memory, some words of each panel in a pass
  kMemory,  // caches or memory, panel after panel
};

// Fetch a line of words that is needed some time later. A hint that it is used only once would keep the digits in the
// caches, but takes four times as long on processors of Intel.
template <Source From>
inline NATIVE_INLINE void fetch(const uint32_t* words) {
  const char* at = reinterpret_cast<const char*>(words);
  if constexpr (From == Source::kPasses) __builtin_prefetch(at + kPrefetchBytes);
  if constexpr (From == Source::kMemory) __builtin_prefetch(at + kWordsAhead);
}

// What else is known of a block of one token. Sums start from what the shift of elements would add to them.
template <int D>
struct DigitBlock {
  int32_t starts[D];
  float factor;
  float sum;  // of the inputs
};

// Digits of one tile as [chunks, num_tokens, kChunkWords], and its blocks as [blocks, num_tokens].
template <int D>
struct DigitTile {
  const int32_t* digits;
  const DigitBlock<D>* blocks;
  int64_t first_token;
  int num_tokens;
};

inline I<4> load_ints(const int32_t* from) {
  I<4> to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

// A format of words has
//   kDigits: the digits of an input
//   kElementColumns, kChunks, kChunkColumns: the columns and the chunks in a word, and the columns in a chunk
//   Products, kMostChunks: sums of products of chunks, and how many chunks they hold
//   kShift, kZero: what is added to elements to make them such bytes, and the zero point that this makes
//   kUnit: what elements are multiples of
//   bytes(words, chunk): the elements of a chunk
//   columns(x, chunk): the columns of a chunk in those of a word
struct Int8Digits {
  using Weight = uint32_t;
  static constexpr int kDigits = 3;
  static constexpr int kElementColumns = 4, kChunks = 1, kChunkColumns = 4;
  static constexpr int kShift = kSignedElements ? 0 : 128, kZero = 0;
  static constexpr int kMostChunks = most_chunks(255);
  static constexpr float kUnit = 1.0f;
  template <int W>
  using Products = ProductSums<W>;

  static inline NATIVE_INLINE I<NATIVE_WIDTH> bytes(const I<NATIVE_WIDTH>& words, int) {
    return kSignedElements ? words : words ^ static_cast<int32_t>(0x80808080);
  }

  static inline I<4> columns(const int32_t* x, int) { return load_ints(x); }
};

#ifdef NATIVE_BYTE_PAIRS
// Int8 with one digit, in 16 bits. The chunks are the even columns of a word and the odd ones.
struct Int8Pairs {
  using Weight = uint32_t;
  static constexpr int kDigits = 1;
  static constexpr int kElementColumns = 4, kChunks = 2, kChunkColumns = 2, kShift = 0, kZero = 0;
  static constexpr int kMostChunks = 1 << 10;
  static constexpr float kUnit = 1.0f;
  template <int W>
  using Products = I<W>;

  static inline NATIVE_INLINE I<NATIVE_WIDTH> bytes(const I<NATIVE_WIDTH>& words, int chunk) {
    using Halves = Pairs<NATIVE_WIDTH>::Vector;
    const Halves halves = (Halves)words;
    return (I<NATIVE_WIDTH>)((chunk == 0 ? halves << 8 : halves) >> 8);
  }

  static inline int32_t digits(const int32_t* x, int chunk) { return (x[chunk] & 0xffff) | x[chunk + 2] << 16; }
};
#endif

// The chunks are the even columns of a word and the odd ones.
struct Int4Digits {
  using Weight = uint32_t;
  static constexpr int kDigits = 3;
  static constexpr int kElementColumns = 8, kChunks = 2, kChunkColumns = 4, kShift = 8, kZero = 8;
  static constexpr int kMostChunks = most_chunks(15);
  static constexpr float kUnit = 1.0f;
  template <int W>
  using Products = ProductSums<W>;

  static inline NATIVE_INLINE I<NATIVE_WIDTH> bytes(const I<NATIVE_WIDTH>& words, int chunk) {
    return (chunk == 0 ? words : words >> 4) & 0x0f0f0f0f;
  }

  static inline I<4> columns(const int32_t* x, int chunk) {
    const F<4> low = bits_of<F<4>>(load_ints(x)), high = bits_of<F<4>>(load_ints(x + 4));
    return bits_of<I<4>>(chunk == 0 ? shuffle<0, 2, 4, 6>(low, high) : shuffle<1, 3, 5, 7>(low, high));
  }
};

// Twice an element of e2m1 is an integer from -12 to 12.
struct Float4Digits : Int4Digits {
  static constexpr int kShift = 12, kMostChunks = most_chunks(24);
  static constexpr float kUnit = 0.5f;

  static inline NATIVE_INLINE I<NATIVE_WIDTH> bytes(const I<NATIVE_WIDTH>& words, int chunk) {
    constexpr uint8_t kShifted[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return looked_up<NATIVE_WIDTH>(kShifted, Int4Digits::bytes(words, chunk));
  }
};

// A format of words whose inputs are rounded to int8.
template <typename Format>
struct Int8Inputs : Format {
  static constexpr int kDigits = 1;
};

#ifdef NATIVE_BYTE_PAIRS
using RoundedInt8Digits = Int8Pairs;
#else
using RoundedInt8Digits = Int8Inputs<Int8Digits>;
#endif

// Sizes of a matrix's groups of columns: each is some words of a row and some blocks, whose last may be shorter.
template <typename Format>
struct DigitGroups {
  int64_t num_groups, words, block_words, blocks;

  explicit DigitGroups(const LinearProblem& p)
      : num_groups(p.num_inputs / p.group_size),
        words(group_elements<Format>(p.group_size)),
        block_words(Format::kDigits == 1 ? words : std::min(words, kDigitColumns / Format::kElementColumns)),
        blocks((words + block_words - 1) / block_words) {}

  int64_t num_words() const { return num_groups * words; }
  int64_t num_blocks() const { return num_groups * blocks; }
  int64_t words_of(int64_t index) const { return std::min(block_words, words - index * block_words); }
  int64_t block_columns() const { return block_words * Format::kElementColumns; }
};

// Return the bits of the largest magnitude.
inline uint32_t largest_magnitude(const float* x, int64_t size) {
  constexpr int W = NATIVE_WIDTH;
  I<W> most = {};
  for (int64_t k = 0; k < size; k += W) {
    const I<W> magnitude = bits_of<I<W>>(load_some<W>(x + k, size - k)) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  return max_lanes<W>(most);
}

// Write the digits of up to `kDigitColumns` integers to chunks that are `stride` apart, and return the digits' sums.
template <typename Format>
inline I<4> write_chunks(const int32_t* integers, int64_t num_columns, int32_t*& to, int64_t stride) {
  I<4> sums = {};
  for (int64_t k = 0; k < num_columns; k += Format::kElementColumns) {
    for (int c = 0; c < Format::kChunks; ++c, to += stride) {
      if constexpr (Format::kChunkColumns == 2) {
        *to = Format::digits(integers + k, c);
        sums[0] += integers[k + c] + integers[k + c + 2];
      } else {
        const I<4> digits = transposed_bytes(Format::columns(integers + k, c));
        sums = add_bytes(sums, digits);
        std::memcpy(to, &digits, Format::kDigits == 1 ? sizeof(int32_t) : sizeof(digits));
      }
    }
  }
  return sums;
}

// Write `size` columns of one token rounded to int8: half to even, with 127.5 steps to the largest magnitude.
template <typename Format>
inline void write_digits(const float* x, int64_t size, int64_t num_chunks, int32_t* to, int64_t stride,
                         DigitBlock<1>& block) {
  constexpr int W = NATIVE_WIDTH;
  const uint32_t largest = largest_magnitude(x, size);
  const bool is_finite = largest < 0x7f800000;
  const float exact = is_finite ? bits_of<float>(largest) / 127.5f : 1.0f, scale = exact == 0 ? 0x1p-23f : exact;
  alignas(64) int32_t integers[kDigitColumns];
  int32_t total = 0;
  const int64_t all_columns = num_chunks * Format::kChunkColumns;
  for (int64_t first = 0; first < all_columns; first += kDigitColumns) {
    const int64_t num_columns = std::min(all_columns - first, kDigitColumns);
    for (int64_t k = 0; k < num_columns; k += W) {
      const I<W> steps = nearest(load_some<W>(x + first + k, std::max<int64_t>(size - first - k, 0)) / scale);
      const I<W> bounded = steps > 127 ? 127 - I<W>{} : steps;
      std::memcpy(integers + k, &bounded, sizeof(bounded));
    }
    total += write_chunks<Format>(integers, num_columns, to, stride)[0];
  }
  block.factor = (is_finite ? scale : std::numeric_limits<float>::quiet_NaN()) * Format::kUnit;
  block.starts[0] = -Format::kShift * total;
  block.sum = static_cast<float>(total) * block.factor;
}

// Write the digits of `size` columns of one token, to chunks that are `stride` apart.
template <typename Format>
inline void write_digits(const float* x, int64_t size, int64_t num_chunks, int32_t* to, int64_t stride,
                         DigitBlock<3>& block) {
  constexpr int W = NATIVE_WIDTH;
  // The largest integer has digits if its magnitude is below 2^23 - 2^15 - 2^7; factors below 2^-126 would be zeros.
  const uint32_t largest = largest_magnitude(x, size);
  const uint32_t exponent = std::max<uint32_t>((largest + 0x10200) >> 23, 23);
  const float inverse = bits_of<float>((276 - exponent) << 23);
  const bool is_finite = largest < 0x7f800000;
  const float factor = is_finite ? bits_of<float>((exponent - 22) << 23) : std::numeric_limits<float>::quiet_NaN();

  // In a sum with 2^7 in each digit, digits are unsigned, and flipping their highest bits takes it away again.
  constexpr int32_t kSevens = 0x808080;
  alignas(64) int32_t all_digits[kDigitColumns];
  const int64_t num_columns = num_chunks * Format::kChunkColumns;
  for (int64_t k = 0; k < num_columns; k += W) {
    const F<W> scaled = load_some<W>(x + k, std::max<int64_t>(size - k, 0)) * inverse;
    const I<W> digits = (nearest(scaled) + kSevens) ^ kSevens;
    std::memcpy(all_digits + k, &digits, sizeof(digits));
  }
  const I<4> sums = write_chunks<Format>(all_digits, num_columns, to, stride);
  int32_t total = 0;
  for (int d = 0; d < 3; ++d) {
    block.starts[d] = -Format::kShift * sums[d];
    total += sums[d] << 8 * d;
  }
  block.factor = factor * Format::kUnit;
  block.sum = static_cast<float>(total) * factor;
}

// Return the vectors of a panel whose sums of products the registers hold.
template <typename Format>
constexpr int vectors_at_once(int num_tokens) {
  int vectors = NATIVE_WIDTH == 16 ? 1 : kVectors;
  while (vectors > 1 && num_tokens * Format::kDigits * vectors > kDigitSums) vectors /= 2;
  return vectors;
}

// Return the tokens of a tile, as many as the registers hold sums of.
template <typename Format>
constexpr int max_digit_tokens() {
  constexpr int kVectorsAtOnce = NATIVE_WIDTH == 4 || (NATIVE_WIDTH == 8 && Format::kDigits == 1) ? 2 : 1;
  return std::min(16, kDigitSums / (Format::kDigits * kVectorsAtOnce));
}

// All tokens cut into tiles, as digits in a buffer of `size(p)` floats.
template <typename WeightFormat>
class DigitTokens {
 public:
  using Format = WeightFormat;
  using Block = DigitBlock<Format::kDigits>;
  static constexpr int64_t kWords = kChunkWords<Format::kDigits>;
  static int64_t task_tokens(const LinearProblem&) { return kCachedTokens; }

  static int64_t size(const LinearProblem& p) {
    const DigitGroups<Format> groups(p);
    return p.num_tokens * (token_words(groups) + groups.num_blocks() * int64_t{sizeof(Block) / sizeof(float)});
  }

  DigitTokens(Executor& executor, const LinearProblem& p, float* buffer)
      : p_(p), groups_(p), tiles_(p.num_tokens, max_digit_tokens<Format>()), digits_(reinterpret_cast<int32_t*>(buffer)) {
    blocks_ = reinterpret_cast<Block*>(digits_ + p.num_tokens * token_words(groups_));
    tiles_.pack_all(executor, p.num_inputs, [&](int64_t i) { pack(i); });
  }

  int64_t num_tiles() const { return tiles_.size(); }
  int64_t first_token(int64_t tile) const { return tiles_.start(tile); }
  int64_t panels_at_once() const { return 1; }

  DigitTile<Format::kDigits> tile(int64_t index) const {
    const int64_t first = tiles_.start(index);
    return {digits_ + first * token_words(groups_), blocks_ + first * groups_.num_blocks(), first,
            static_cast<int>(tiles_.start(index + 1) - first)};
  }

 private:
  static int64_t token_words(const DigitGroups<Format>& groups) {
    return groups.num_words() * Format::kChunks * kWords;
  }

  void pack(int64_t index) const {
    const int64_t first = tiles_.start(index), num_tokens = tiles_.start(index + 1) - first;
    struct Prepared;
    float* buffer = scratch<Prepared>(p_.num_inputs);
    for (int64_t t = 0; t < num_tokens; ++t) {
      const float* x = prepare(p_, first + t, buffer);
      int32_t* to = digits_ + first * token_words(groups_) + t * kWords;
      Block* block = blocks_ + first * groups_.num_blocks() + t;
      for (int64_t group = 0; group < groups_.num_groups; ++group, x += p_.group_size) {
        for (int64_t i = 0; i < groups_.blocks; ++i, block += num_tokens) {
          const int64_t column = i * groups_.block_columns();
          const int64_t size = std::min(groups_.block_columns(), p_.group_size - column);
          const int64_t num_chunks = groups_.words_of(i) * Format::kChunks, stride = num_tokens * kWords;
          write_digits<Format>(x + column, size, num_chunks, to, stride, *block);
          to += num_chunks * stride;
        }
      }
    }
  }

  const LinearProblem& p_;
  DigitGroups<Format> groups_;
  Tiles tiles_;
  int32_t* digits_;
  Block* blocks_;
};

// A range of a row's blocks: the first one's group and index in it, and the words of a row before it.
struct DigitRange {
  int64_t first, end, group, index, first_word;

  template <typename Format>
  DigitRange(const DigitGroups<Format>& groups, int64_t first, int64_t end)
      : first(first), end(end), group(first / groups.blocks), index(first % groups.blocks),
        first_word(group * groups.words + index * groups.block_words) {}
};

// Fetch scales and zero points that are needed some groups later. Those of the next panel follow.
inline NATIVE_INLINE void fetch_scales(const LinearProblem& p, int64_t panel, int64_t group, int64_t num_groups) {
  const int64_t at = (panel * num_groups + group) * kPanelRows + kScalesAhead / int64_t{sizeof(float)};
  __builtin_prefetch(p.scales + at);
  if (p.zeros) __builtin_prefetch(p.zeros + at);
}

// Add the products of a block of V vectors to `sums`, which begin with what the shift of elements would add to them.
// Words come from the source `From`.
template <typename Format, Source From, int Tokens, int V>
inline NATIVE_INLINE void add_block(const uint32_t* from, int64_t num_words, const int32_t* digits,
                                    I<NATIVE_WIDTH> (&sums)[Tokens][Format::kDigits][V]) {
  constexpr int W = NATIVE_WIDTH, D = Format::kDigits, kSumWords = Format::kMostChunks / Format::kChunks;
  using Products = typename Format::template Products<W>;
  for (int64_t first = 0; first < num_words; first += kSumWords) {
    Products products[Tokens][D][V];
    unrolled<Tokens>([&](int t) NATIVE_INLINE {
      unrolled_pairs<D, V>([&](int d, int v) NATIVE_INLINE { products[t][d][v] = Products{}; });
    });
    const auto add_word = [&](int64_t element) NATIVE_INLINE {
      I<W> words[V];
      for (int v = 0; v < V; ++v) words[v] = load_words<W>(from + element + v * W);
      fetch<From>(from + element);
      for (int c = 0; c < Format::kChunks; ++c) {
        I<W> bytes[V];
        for (int v = 0; v < V; ++v) bytes[v] = Format::bytes(words[v], c);
        unrolled<Tokens>([&](int t) NATIVE_INLINE {
          add_products<D, V>(products[t], bytes, digits + t * kChunkWords<D>);
        });
        digits += Tokens * kChunkWords<D>;
      }
    };
    if (Tokens == 1 && kSumWords <= 4 && first + kSumWords <= num_words) {
      unrolled<std::min(kSumWords, 4)>([&](int i) NATIVE_INLINE { add_word((first + i) * kPanelRows); });
    } else {
      const int64_t end = std::min<int64_t>(first + kSumWords, num_words) * kPanelRows;
      for (int64_t element = first * kPanelRows; element < end; element += kPanelRows) add_word(element);
    }
    unrolled<Tokens>([&](int t) NATIVE_INLINE {
      unrolled_pairs<D, V>([&](int d, int v) NATIVE_INLINE { sums[t][d][v] += widened<W>(products[t][d][v]); });
    });
  }
}

// Return the sums of products of a block with a token as floats.
template <typename Format>
inline NATIVE_INLINE F<NATIVE_WIDTH> block_sums(const I<NATIVE_WIDTH> (&sums)[Format::kDigits],
                                                const DigitBlock<Format::kDigits>& block) {
  constexpr int W = NATIVE_WIDTH;
  if constexpr (Format::kDigits == 1) {
    return to_floats<W>(sums[0]) * block.factor;
  } else {
    const I<W> low = sums[0] + (sums[1] << 8);
    return fma<W>(to_floats<W>(sums[2]), all<W>(65536.0f), to_floats<W>(low)) * block.factor;
  }
}

// Add the products of some blocks of a panel to a tile's sums [Tokens, kVectors] in `kept`, and write y after the last
// block. One panel at a time is a single stream of memory, which goes on in the next panel.
template <typename Format, int Tokens, Source From>
void multiply_digits(const LinearProblem& p, const DigitGroups<Format>& groups,
                     const DigitTile<Format::kDigits>& tile, int64_t panel, const DigitRange& range, float* kept) {
  constexpr int W = NATIVE_WIDTH, D = Format::kDigits;
  constexpr int kTogether = vectors_at_once<Format>(Tokens), kParts = kVectors / kTogether;
  int64_t group = range.group, index = range.index;
  const auto* from = static_cast<const uint32_t*>(p.weight) + (panel * groups.num_words() + range.first_word) * kPanelRows;
  const int32_t* digits = tile.digits + range.first_word * Format::kChunks * Tokens * kChunkWords<D>;
  F<W> sums[Tokens][kVectors] = {};
  if (range.first > 0) {
    for (int t = 0; t < Tokens; ++t) {
      for (int v = 0; v < kVectors; ++v) sums[t][v] = load<W>(kept + (t * kVectors + v) * W);
    }
  }
  for (int64_t i = range.first; i < range.end; ++i) {
    const DigitBlock<D>* block = tile.blocks + i * Tokens;
    const int64_t num_words = groups.words_of(index);
    if constexpr (From != Source::kCache) fetch_scales(p, panel, group, groups.num_groups);
    const GroupScales<kVectors> scales(p, p.zeros != nullptr, groups.num_groups, panel, group);
    unrolled<kParts>([&](int part) NATIVE_INLINE {
      const int first = part * kTogether;
      I<W> parts[Tokens][D][kTogether];
      unrolled<Tokens>([&](int t) NATIVE_INLINE {
        for (int d = 0; d < D; ++d) {
          for (int v = 0; v < kTogether; ++v) parts[t][d][v] = block[t].starts[d] - I<W>{};
        }
      });
      if (part == 0) {  // the whole lines of all parts
        add_block<Format, From>(from, num_words, digits, parts);
      } else {
        add_block<Format, Source::kCache>(from + first * W, num_words, digits, parts);
      }
      unrolled<Tokens>([&](int t) NATIVE_INLINE {
        for (int v = 0; v < kTogether; ++v) {
          const int u = first + v;
          I<W> digit_sums[D];
          unrolled<D>([&](int d) NATIVE_INLINE { digit_sums[d] = parts[t][d][v]; });
          F<W> sum = block_sums<Format>(digit_sums, block[t]);
          if (p.zeros) sum = fma<W>(all<W>(-block[t].sum), scales.zeros[u] - static_cast<float>(Format::kZero), sum);
          sums[t][u] = fma<W>(scales.scales[u], sum, sums[t][u]);
        }
      });
    });
    from += num_words * kPanelRows;
    digits += num_words * Format::kChunks * Tokens * kChunkWords<D>;
    if (++index == groups.blocks) index = 0, ++group;
  }
  if (range.end == groups.num_blocks()) return finish_by_call<Tokens, 1>(p, tile.first_token, panel, sums);
  for (int t = 0; t < Tokens; ++t) {
    for (int v = 0; v < kVectors; ++v) store<W>(kept + (t * kVectors + v) * W, sums[t][v]);
  }
}

template <typename Format>
using MultiplyDigits = void (*)(const LinearProblem&, const DigitGroups<Format>&, const DigitTile<Format::kDigits>&,
                                int64_t, const DigitRange&, float*);
template <typename Format>
using ByDigitTokens = std::array<MultiplyDigits<Format>, max_digit_tokens<Format>()>;
template <typename Format>
using DigitTokenCounts = std::make_integer_sequence<int, max_digit_tokens<Format>()>;

template <typename Format, Source From, int... I>
constexpr ByDigitTokens<Format> digit_tiles(std::integer_sequence<int, I...>) {
  return {multiply_digits<Format, I + 1, From>...};
}

// Multiply a lone tile with a range of panels.
template <typename Format>
void multiply_panels(const LinearProblem& p, const DigitTokens<Format>& tokens, int64_t panel, int64_t end_panel) {
  static constexpr auto by_tokens = digit_tiles<Format, Source::kMemory>(DigitTokenCounts<Format>{});
  const DigitTile<Format::kDigits> tile = tokens.tile(0);
  const DigitGroups<Format> groups(p);
  const DigitRange all_blocks(groups, 0, groups.num_blocks());
  for (; panel < end_panel; ++panel) by_tokens[tile.num_tokens - 1](p, groups, tile, panel, all_blocks, nullptr);
}

// Multiply some tiles with a range of panels. A block of some panels stays in the first-level cache while all tiles
// pass, and the sums wait in the second-level cache between blocks.
template <typename Format>
void multiply_blocks(const LinearProblem& p, const DigitTokens<Format>& tokens, int64_t first_tile, int64_t end_tile,
                     int64_t first_panel, int64_t end_panel) {
  static constexpr auto from_memory = digit_tiles<Format, Source::kPasses>(DigitTokenCounts<Format>{});
  static constexpr auto from_cache = digit_tiles<Format, Source::kCache>(DigitTokenCounts<Format>{});
  constexpr int64_t kTileSums = max_digit_tokens<Format>() * kPanelRows;
  const DigitGroups<Format> groups(p);
  const int64_t num_blocks = groups.num_blocks();
  const int64_t pass_words = cached_bytes() / (kGroupPanels * kPanelRows * int64_t{sizeof(uint32_t)});
  const int64_t step = std::max<int64_t>(1, pass_words * num_blocks / groups.num_words());
  struct Sums;
  float* sums = scratch<Sums>(step < num_blocks ? kGroupPanels * (end_tile - first_tile) * kTileSums : 0);
  for (int64_t panels = first_panel; panels < end_panel; panels += kGroupPanels) {
    for (int64_t block = 0; block < num_blocks; block += step) {
      const DigitRange range(groups, block, std::min(block + step, num_blocks));
      float* kept = sums;
      for (int64_t i = first_tile; i < end_tile; ++i) {
        const DigitTile<Format::kDigits> tile = tokens.tile(i);
        const auto& by_tokens = i == first_tile ? from_memory : from_cache;
        for (int64_t panel = panels; panel < std::min(panels + kGroupPanels, end_panel); ++panel, kept += kTileSums) {
          by_tokens[tile.num_tokens - 1](p, groups, tile, panel, range, kept);
        }
      }
    }
  }
}

}  // namespace NATIVE_ISA
