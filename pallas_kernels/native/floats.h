// Products by float arithmetic. Each output is one sum over the inputs in their order, or over the groups of a
// quantised matrix in theirs.
//
// Few tokens are one tile, whose sums stay in registers while weights are converted on the way. With more tokens, vectors
// of 8 floats and panels of floats that fit the second-level cache, all tiles pass one panel after the other. Otherwise a
// block of columns of some panels is converted to floats once, stays in the first-level cache while all tiles pass, and
// the sums wait in the second-level cache between blocks.

#pragma once

#include <type_traits>

#include "products.h"

namespace NATIVE_ISA {

// Tokens of a tile, as many as the registers hold.
#ifdef __aarch64__
constexpr int kMaxTileTokens = 6;
#else
constexpr int kMaxTileTokens = NATIVE_WIDTH == 16 ? 12 : NATIVE_WIDTH == 8 ? 6 : 5;
#endif

// Return the columns of panels that stay in a core's first-level cache as floats.
inline int64_t block_columns() { return cached_bytes() / (kPanels * kPanelRows * int64_t{sizeof(float)}); }

// A weight format has
//   Weight, kElementColumns: an element of memory, and the columns in one
//   kGrouped, kHasZeros: whether groups of columns have scales, and always zero points
//   kFactors: what inputs of column k are multiplied by, in place k % 4, as weights are that much too large
//   each<V, FromMemory>(from, stride, size, use, distance): call use(k, weights) for `size` columns of V vectors, with
//     `stride` elements per panel; FromMemory if they are in no cache yet: then fetch those `distance` bytes later
template <typename Number>
struct Floats {
  using Weight = Number;
  static constexpr int kElementColumns = 1;
  static constexpr bool kGrouped = false, kHasZeros = false;
  static constexpr std::array<float, 4> kFactors = {1.0f, 1.0f, 1.0f, 1.0f};

  static constexpr int64_t kLineColumns = std::max<int64_t>(1, kLineBytes / (kPanelRows * sizeof(Number)));

  template <int V, bool FromMemory, typename Use>
  static inline NATIVE_INLINE void each(const Number* from, int64_t stride, int64_t size, const Use& use,
                                        int64_t distance = kPrefetchBytes) {
    constexpr int W = NATIVE_WIDTH;
    const auto use_one = [&](int64_t k) NATIVE_INLINE {
      F<W> w[V];
      for (int v = 0; v < V; ++v) w[v] = load<W>(from + v / kVectors * stride + k * kPanelRows + v % kVectors * W);
      use(k, w);
    };
    int64_t k = 0;
    for (; k + kLineColumns <= size; k += kLineColumns) {
      if constexpr (FromMemory) prefetch<V>(from + k * kPanelRows, stride, distance);
      for (int i = 0; i < kLineColumns; ++i) use_one(k + i);
    }
    for (; k < size; ++k) use_one(k);
  }
};

// Elements are read 2^-8 times as large, and inputs are as much larger.
struct Float8Weights : Floats<Float8> {
  static constexpr bool kGrouped = true;
  static constexpr float kFactor = kLoadedUnit<Float8>;
  static constexpr std::array<float, 4> kFactors = {kFactor, kFactor, kFactor, kFactor};
};

template <int I>
using InWord = std::integral_constant<int, I>;

// Elements are moved to the highest byte of their word: they are 2^24 times as large, and inputs as much smaller.
struct Int8 {
  using Weight = uint32_t;
  static constexpr int kElementColumns = 4;
  static constexpr bool kGrouped = true, kHasZeros = false;
  static constexpr float kFactor = 1.0f / (1 << 24);
  static constexpr std::array<float, 4> kFactors = {kFactor, kFactor, kFactor, kFactor};

  template <int V, bool FromMemory, typename Use>
  static inline NATIVE_INLINE void each(const uint32_t* from, int64_t stride, int64_t size, const Use& use,
                                        int64_t distance = kPrefetchBytes) {
    constexpr int W = NATIVE_WIDTH;
    I<W> words[V];
    const auto read = [&]() NATIVE_INLINE {
      for (int v = 0; v < V; ++v) words[v] = load_words<W>(from + v / kVectors * stride + v % kVectors * W);
      if constexpr (FromMemory) prefetch<V>(from, stride, distance);
      from += kPanelRows;
    };
    const auto use_one = [&](int64_t k, auto byte) NATIVE_INLINE {
      F<W> w[V];
      for (int v = 0; v < V; ++v) w[v] = to_floats<W>(byte_on_top<W, decltype(byte)::value>(words[v]));
      use(k, w);
    };
    int64_t k = 0;
    for (; k + 4 <= size; k += 4) {
      read();
      use_one(k, InWord<0>{}), use_one(k + 1, InWord<1>{}), use_one(k + 2, InWord<2>{}), use_one(k + 3, InWord<3>{});
    }
    if (k == size) return;
    read();
    use_one(k, InWord<0>{});
    if (k + 1 < size) use_one(k + 1, InWord<1>{});
    if (k + 2 < size) use_one(k + 2, InWord<2>{});
  }
};

// Elements are masked in place, without a shift: those of column k are 16^(k % 4) times as large, and inputs as much
// smaller, which is exact.
struct Int4 {
  using Weight = uint32_t;
  static constexpr int kElementColumns = 8;
  static constexpr bool kGrouped = true, kHasZeros = true;
  static constexpr std::array<float, 4> kFactors = {1.0f, 1.0f / 16, 1.0f / 256, 1.0f / 4096};

  template <int V, bool FromMemory, typename Use>
  static inline NATIVE_INLINE void each(const uint32_t* from, int64_t stride, int64_t size, const Use& use,
                                        int64_t distance = kPrefetchBytes) {
    constexpr int W = NATIVE_WIDTH;
    I<W> words[V];
    const auto read = [&]() NATIVE_INLINE {
      for (int v = 0; v < V; ++v) words[v] = load_words<W>(from + v / kVectors * stride + v % kVectors * W);
      if constexpr (FromMemory) prefetch<V>(from, stride, distance);
      from += kPanelRows;
    };
    const auto use_one = [&](int64_t k, int32_t mask) NATIVE_INLINE {
      F<W> w[V];
      for (int v = 0; v < V; ++v) w[v] = to_floats<W>(words[v] & mask);
      use(k, w);
    };
    int64_t k = 0;
    for (; k + 8 <= size; k += 8) {
      read();
      use_one(k, 0xf), use_one(k + 1, 0xf0), use_one(k + 2, 0xf00), use_one(k + 3, 0xf000);
      for (int v = 0; v < V; ++v) words[v] >>= 16;
      use_one(k + 4, 0xf), use_one(k + 5, 0xf0), use_one(k + 6, 0xf00), use_one(k + 7, 0xf000);
    }
    if (k == size) return;
    read();
    for (int i = 0; k < size; ++k, ++i) {
      use_one(k, 0xf << 4 * (i % 4));
      if (i == 3) {
        for (int v = 0; v < V; ++v) words[v] >>= 16;
      }
    }
  }
};

// Tokens of one tile as [K, num_tokens], and the sums of their groups as [groups, num_tokens] if the format needs them.
struct Tile {
  const float* x;
  const float* group_sums;
  int64_t first_token;
  int num_tokens;
};

// Add the products of `size` columns to the sums.
template <typename Format, bool FromMemory, int Tokens, int V>
inline NATIVE_INLINE void accumulate(F<NATIVE_WIDTH> (&sums)[Tokens][V], const typename Format::Weight* from,
                                     int64_t stride, int64_t size, const float* x, int64_t distance = kPrefetchBytes) {
  constexpr int W = NATIVE_WIDTH;
  const auto use = [&](int64_t k, const F<W>(&w)[V]) NATIVE_INLINE {
    unrolled<Tokens>([&](int t) NATIVE_INLINE {
      const F<W> input = all<W>(x[k * Tokens + t]);
      unrolled<V>([&](int v) NATIVE_INLINE { sums[t][v] = fma<W>(input, w[v], sums[t][v]); });
    });
  };
  Format::template each<V, FromMemory>(from, stride, size, use, distance);
}

// Add the sums over one group to those of the row. `group_sums` are the tokens' sums of inputs; null for no zeros.
template <int Tokens, int V>
inline NATIVE_INLINE void add_group(F<NATIVE_WIDTH> (&sums)[Tokens][V], const F<NATIVE_WIDTH> (&part)[Tokens][V],
                                    const GroupScales<V>& group, const float* group_sums) {
  constexpr int W = NATIVE_WIDTH;
  unrolled_pairs<Tokens, V>([&](int t, int v) NATIVE_INLINE {
    const F<W> sum = group_sums ? fma<W>(all<W>(-group_sums[t]), group.zeros[v], part[t][v]) : part[t][v];
    sums[t][v] = fma<W>(group.scales[v], sum, sums[t][v]);
  });
}

// Compute y of a tile for `Panels` panels from `panel` on.
template <typename Format, int Tokens, int Panels>
void multiply(const LinearProblem& p, const Tile& tile, int64_t panel) {
  constexpr int V = Panels * kVectors;
  const int64_t group_size = p.group_size, num_groups = p.num_inputs / group_size;
  const int64_t group_stride = group_elements<Format>(group_size) * kPanelRows, stride = num_groups * group_stride;
  const auto* from = static_cast<const typename Format::Weight*>(p.weight) + panel * stride;
  // Near the end of these panels those after them are fetched, of the next call.
  const int64_t element_bytes = sizeof(*from), panel_bytes = stride * element_bytes;
  const int64_t next_distance = kPrefetchBytes + (Panels - 1) * panel_bytes;
  F<NATIVE_WIDTH> sums[Tokens][V] = {};
  if constexpr (Format::kGrouped) {
    for (int64_t group = 0; group < num_groups; ++group) {
      F<NATIVE_WIDTH> part[Tokens][V] = {};
      const bool is_near_end = (num_groups - group) * group_stride * element_bytes <= kPrefetchBytes;
      accumulate<Format, true>(part, from + group * group_stride, stride, group_size, tile.x + group * group_size * Tokens,
                               is_near_end ? next_distance : kPrefetchBytes);
      const float* group_sums = tile.group_sums ? tile.group_sums + group * Tokens : nullptr;
      add_group(sums, part, GroupScales<V>(p, group_sums != nullptr, num_groups, panel, group), group_sums);
    }
  } else {
    const int64_t num_last = std::min<int64_t>(kPrefetchBytes / (kPanelRows * element_bytes), p.num_inputs);
    const int64_t num_first = p.num_inputs - num_last;
    accumulate<Format, true>(sums, from, stride, num_first, tile.x);
    accumulate<Format, true>(sums, from + num_first * kPanelRows, stride, num_last, tile.x + num_first * Tokens,
                             next_distance);
  }
  finish_by_call<Tokens, Panels>(p, tile.first_token, panel, sums);
}

// Columns of some panels as floats.
struct ColumnBlock {
  const float* weights;  // [panels][columns, 16]
  int64_t stride;        // floats per panel
  int64_t panel, first_column, num_columns;
  NextBlock next;
};

// Add the products of columns [first, first + size) of a block to the sums.
template <int Tokens, int V>
inline NATIVE_INLINE void accumulate_block(F<NATIVE_WIDTH> (&sums)[Tokens][V], ColumnBlock& block, int64_t first,
                                           int64_t size, const float* x) {
  for (int64_t k = first, left = size; left > 0; k += NextBlock::kStepColumns, left -= NextBlock::kStepColumns) {
    block.next.fetch();
    const int64_t step = std::min(left, NextBlock::kStepColumns);
    accumulate<Floats<float>, false>(sums, block.weights + k * kPanelRows, block.stride, step, x + k * Tokens);
  }
}

// Add one block's products to a tile's sums [Tokens, V], and write y after the last block. Not `Grouped` are matrices with
// a single group of columns, too: their scales multiply the whole sums.
template <bool Grouped, int Tokens, int Panels>
void multiply_block(const LinearProblem& p, const Tile& tile, ColumnBlock& block, float* kept) {
  constexpr int W = NATIVE_WIDTH, V = Panels * kVectors;
  F<W> sums[Tokens][V];
  if (block.first_column > 0) {
    unrolled_pairs<Tokens, V>([&](int t, int v) NATIVE_INLINE { sums[t][v] = load<W>(kept + (t * V + v) * W); });
  } else {
    unrolled_pairs<Tokens, V>([&](int t, int v) NATIVE_INLINE { sums[t][v] = F<W>{}; });
  }
  const float* x = tile.x + block.first_column * Tokens;
  if constexpr (Grouped) {
    const int64_t num_groups = p.num_inputs / p.group_size;
    int64_t group = block.first_column / p.group_size;
    for (int64_t k = 0; k < block.num_columns; k += p.group_size, ++group) {
      F<W> part[Tokens][V];
      unrolled_pairs<Tokens, V>([&](int t, int v) NATIVE_INLINE { part[t][v] = F<W>{}; });
      accumulate_block(part, block, k, p.group_size, x);
      const float* group_sums = tile.group_sums ? tile.group_sums + group * Tokens : nullptr;
      add_group(sums, part, GroupScales<V>(p, group_sums != nullptr, num_groups, block.panel, group), group_sums);
    }
  } else {
    accumulate_block(sums, block, 0, block.num_columns, x);
  }
  if (block.first_column + block.num_columns == p.num_inputs) {
    F<W> finished[Tokens][V];
    if (!Grouped && p.scales) {
      unrolled_pairs<Tokens, V>([&](int t, int v) NATIVE_INLINE { finished[t][v] = F<W>{}; });
      add_group(finished, sums, GroupScales<V>(p, tile.group_sums != nullptr, 1, block.panel, 0), tile.group_sums);
    } else {
      unrolled_pairs<Tokens, V>([&](int t, int v) NATIVE_INLINE { finished[t][v] = sums[t][v]; });
    }
    finish_copy<Tokens, Panels>(p, tile.first_token, block.panel, finished);
  } else {
    unrolled_pairs<Tokens, V>([&](int t, int v) NATIVE_INLINE { store<W>(kept + (t * V + v) * W, sums[t][v]); });
  }
}

// Write columns of one panel as floats [columns, 16]: part of a group, or whole groups.
template <typename Format>
void convert(const typename Format::Weight* from, int64_t num_columns, int64_t group_size, float* to) {
  constexpr int W = NATIVE_WIDTH;
  const int64_t step = std::min(group_size, num_columns);
  for (int64_t column = 0; column < num_columns; column += step, to += step * kPanelRows) {
    Format::template each<kVectors, true>(from, 0, step, [&](int64_t k, const F<W>(&w)[kVectors]) NATIVE_INLINE {
      for (int v = 0; v < kVectors; ++v) store<W>(to + k * kPanelRows + v * W, w[v]);
    });
    from += group_elements<Format>(step) * kPanelRows;
  }
}

// Return the panels that a lone tile works on at once: for few tokens several, so that additions do not wait for each
// other.
constexpr int lone_panels(int num_tokens) {
  constexpr int kSums = kMaxTileTokens * kPanels;  // panels of sums that the registers hold
  const int most = NATIVE_WIDTH == 16 ? 4 : 2;
  return num_tokens * most <= kSums ? most : kPanels;
}

using Multiply = void (*)(const LinearProblem&, const Tile&, int64_t);
using MultiplyBlock = void (*)(const LinearProblem&, const Tile&, ColumnBlock&, float*);
template <typename Function>
using ByTokens = std::array<Function, kMaxTileTokens>;
using TokenCounts = std::make_integer_sequence<int, kMaxTileTokens>;

template <typename Format, int... I>
constexpr ByTokens<Multiply> lone_tiles(std::integer_sequence<int, I...>) {
  return {multiply<Format, I + 1, lone_panels(I + 1)>...};
}

template <typename Format, int... I>
constexpr ByTokens<Multiply> lone_tiles_of_one_panel(std::integer_sequence<int, I...>) {
  return {multiply<Format, I + 1, 1>...};
}

template <bool Grouped, int Panels, int... I>
constexpr ByTokens<MultiplyBlock> blocks(std::integer_sequence<int, I...>) {
  return {multiply_block<Grouped, I + 1, Panels>...};
}

// All tokens cut into tiles of nearly equal size, each packed for `accumulate` in a buffer of `size(p)` floats.
template <typename WeightFormat>
class PackedTokens {
 public:
  using Format = WeightFormat;
  static int64_t task_tokens(const LinearProblem&) { return kCachedTokens; }

  static bool has_zeros(const LinearProblem& p) { return Format::kHasZeros || p.zeros; }
  static int64_t size(const LinearProblem& p) {
    const bool is_prepared = p.x.is_bfloat16 || p.norm || p.input_format != InputFormat::kFloat32 || kScalesInputs;
    if (p.num_tokens == 1 && !is_prepared && !has_zeros(p)) return 0;  // used as it is
    return p.num_tokens * (p.num_inputs + (has_zeros(p) ? p.num_inputs / p.group_size : 0));
  }

  PackedTokens(Executor& executor, const LinearProblem& p, float* buffer)
      : p_(p), num_groups_(p.num_inputs / p.group_size), tiles_(p.num_tokens, kMaxTileTokens) {
    if (size(p) == 0) return;
    packed_ = buffer;
    group_sums_ = has_zeros(p) ? packed_ + p.num_tokens * p.num_inputs : nullptr;
    tiles_.pack_all(executor, p.num_inputs, [&](int64_t i) { pack(i); });
  }

  int64_t num_tiles() const { return tiles_.size(); }
  int64_t first_token(int64_t tile) const { return tiles_.start(tile); }
  int64_t panels_at_once() const { return num_tiles() == 1 ? lone_panels(tile(0).num_tokens) : kPanels; }

  Tile tile(int64_t index) const {
    const int64_t first = tiles_.start(index);
    const float* x = packed_ ? packed_ + first * p_.num_inputs : static_cast<const float*>(p_.x.data);
    const float* group_sums = group_sums_ ? group_sums_ + first * num_groups_ : nullptr;
    return {x, group_sums, first, static_cast<int>(tiles_.start(index + 1) - first)};
  }

 private:
  static constexpr bool kScalesInputs = Format::kFactors[3] != 1.0f;

  void pack(int64_t index) const {
    const int64_t first = tiles_.start(index), num_tokens = tiles_.start(index + 1) - first, K = p_.num_inputs;
    float* to = packed_ + first * K;
    struct Prepared;
    float* buffer = scratch<Prepared>(num_tokens * K);
    std::array<const float*, kMaxTileTokens> from;
    for (int64_t t = 0; t < num_tokens; ++t) {
      from[t] = prepare(p_, first + t, buffer + t * K);
      if (group_sums_) sum_groups(from[t], group_sums_ + first * num_groups_ + t, num_tokens);
      if constexpr (kScalesInputs) from[t] = scale_inputs(from[t], buffer + t * K);
    }
    int64_t k = 0;
    for (; num_tokens >= 4 && k + 4 <= K; k += 4) {
      for (int64_t i = 0; i < num_tokens; i += 4) {
        const int64_t t = std::min(i, num_tokens - 4);  // the last four may be some again
        transpose4(to + k * num_tokens + t, num_tokens, from[t] + k, from[t + 1] + k, from[t + 2] + k, from[t + 3] + k);
      }
    }
    for (; k < K; ++k) {
      for (int64_t t = 0; t < num_tokens; ++t) to[k * num_tokens + t] = from[t][k];
    }
  }

  void sum_groups(const float* x, float* to, int64_t stride) const {
    constexpr int W = NATIVE_WIDTH;
    for (int64_t group = 0; group < num_groups_; ++group, x += p_.group_size, to += stride) {
      F<W> sums = {};
      for (int64_t k = 0; k < p_.group_size; k += W) sums += load_some<W>(x + k, p_.group_size - k);
      *to = sum_lanes<W>(sums);
    }
  }

  const float* scale_inputs(const float* x, float* to) const {
    for (int64_t group = 0; group < p_.num_inputs; group += p_.group_size) {
      for (int64_t k = 0; k < p_.group_size; ++k) to[group + k] = x[group + k] * Format::kFactors[k % 4];
    }
    return to;
  }

  const LinearProblem& p_;
  int64_t num_groups_;
  Tiles tiles_;
  float *packed_ = nullptr, *group_sums_ = nullptr;
};

// Compute y of one of several tiles for a panel of floats, and fetch `Lines` lines from `ahead` on per step of columns.
template <int Tokens, int Lines>
void multiply_panel(const LinearProblem& p, const Tile& tile, int64_t panel, const char* ahead) {
  constexpr int W = NATIVE_WIDTH;
  const float *from = static_cast<const float*>(p.weight) + panel * p.num_inputs * kPanelRows, *x = tile.x;
  F<W> sums[Tokens][kVectors] = {};
  const auto use_one = [&]() NATIVE_INLINE {
    F<W> w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = load<W>(from + v * W);
    unrolled<Tokens>([&](int t) NATIVE_INLINE {
      const F<W> input = all<W>(x[t]);
      unrolled<kVectors>([&](int v) NATIVE_INLINE { sums[t][v] = fma<W>(input, w[v], sums[t][v]); });
    });
    from += kPanelRows, x += Tokens;
  };
  int64_t k = 0;
  for (; k + kAheadColumns <= p.num_inputs; k += kAheadColumns) {
    for (int i = 0; i < Lines; ++i, ahead += kLineBytes) __builtin_prefetch(ahead, 0, 2);
    unrolled<kAheadColumns>([&](int) NATIVE_INLINE { use_one(); });
  }
  for (; k < p.num_inputs; ++k) use_one();
  finish_by_call<Tokens, 1>(p, tile.first_token, panel, sums);
}

using MultiplyPanel = void (*)(const LinearProblem&, const Tile&, int64_t, const char*);

template <int Lines, int... I>
constexpr ByTokens<MultiplyPanel> whole_panels(std::integer_sequence<int, I...>) {
  return {multiply_panel<I + 1, Lines>...};
}

// Multiply some tiles with a range of panels of floats. Each tile fetches its share of the next panel, so that reading and
// computing overlap; sums stay in registers.
inline void multiply_whole_panels(const LinearProblem& p, const PackedTokens<Floats<float>>& tokens, int64_t first_tile,
                                  int64_t end_tile, const PanelPart& here, const PanelPart& ahead) {
  static constexpr auto of_few = whole_panels<2>(TokenCounts{}), of_many = whole_panels<1>(TokenCounts{});
  constexpr int64_t kFewTiles = 3;  // more of them fetch a panel with a line per step
  const int64_t num_tiles = end_tile - first_tile, panel_bytes = p.num_inputs * kPanelRows * int64_t{sizeof(float)};
  const int64_t tile_bytes = (panel_bytes / num_tiles + kLineBytes - 1) / kLineBytes * kLineBytes;
  const auto& by_tokens = num_tiles <= kFewTiles ? of_few : of_many;
  for (int64_t panel = here.panel; panel < here.end_panel; ++panel) {
    const int64_t next = panel + 1 < here.end_panel ? panel + 1 : ahead.panel;
    const char* from = static_cast<const char*>(p.weight) + next * panel_bytes;
    for (int64_t i = 0; i < num_tiles; ++i) {
      const Tile tile = tokens.tile(first_tile + i);
      by_tokens[tile.num_tokens - 1](p, tile, panel, from + i * tile_bytes);
    }
  }
}

// Multiply a lone tile with a range of panels.
template <typename Format>
void multiply_panels(const LinearProblem& p, const PackedTokens<Format>& tokens, int64_t panel, int64_t end_panel) {
  static constexpr auto several = lone_tiles<Format>(TokenCounts{});
  static constexpr auto single = lone_tiles_of_one_panel<Format>(TokenCounts{});
  const Tile tile = tokens.tile(0);
  const int num_panels = lone_panels(tile.num_tokens);
  for (; panel + num_panels <= end_panel; panel += num_panels) several[tile.num_tokens - 1](p, tile, panel);
  for (; panel < end_panel; ++panel) single[tile.num_tokens - 1](p, tile, panel);
}

// Multiply some tiles with a range of panels, block by block.
template <typename Format>
void multiply_blocks(const LinearProblem& p, const PackedTokens<Format>& tokens, int64_t first_tile, int64_t end_tile,
                     int64_t first_panel, int64_t end_panel) {
  static constexpr auto pairs = blocks<false, kPanels>(TokenCounts{}), singles = blocks<false, 1>(TokenCounts{});
  static constexpr auto grouped_pairs = blocks<Format::kGrouped, kPanels>(TokenCounts{});
  static constexpr auto grouped_singles = blocks<Format::kGrouped, 1>(TokenCounts{});
  constexpr int64_t kTileSums = kMaxTileTokens * kPanels * kPanelRows;
  const int64_t K = p.num_inputs, group_stride = group_elements<Format>(p.group_size) * kPanelRows;
  const bool is_grouped = p.group_size < K;
  const int64_t unit = is_grouped ? p.group_size : Format::kElementColumns;  // columns
  const int64_t unit_stride = is_grouped ? group_stride : kPanelRows;
  const int64_t stride = K / p.group_size * group_stride;  // elements per panel
  const int64_t columns = std::max<int64_t>(1, block_columns() / unit) * unit;  // whole groups
  const int64_t num_tiles = end_tile - first_tile;
  struct Sums;
  float* sums = scratch<Sums>(columns < K ? (kGroupPanels / kPanels + 1) * num_tiles * kTileSums : 0);
  struct Converted;
  float* converted = scratch<Converted>(kPanels * columns * kPanelRows);
  const auto* weights = static_cast<const typename Format::Weight*>(p.weight);
  const auto address = [&](int64_t panel, int64_t column) {
    return weights + panel * stride + column / unit * unit_stride;
  };
  // Bytes of a column, of words in part.
  const int64_t column_bytes = (stride * int64_t{sizeof(*weights)} + K - 1) / K, panel_bytes = stride * int64_t{sizeof(*weights)};

  each_block(first_panel, end_panel, kGroupPanels, kPanels, K, columns, [&](const PanelBlock& here, const PanelBlock& next) {
    ColumnBlock block{converted, columns * kPanelRows, here.panel, here.column, here.num_columns, {}};
    if constexpr (std::is_same_v<Format, Floats<float>>) {
      block.weights = address(here.panel, here.column);
      block.stride = stride;
    } else {
      for (int64_t i = 0; i < here.num_panels; ++i) {
        const auto* from = address(here.panel + i, here.column);
        convert<Format>(from, here.num_columns, p.group_size, converted + i * block.stride);
      }
    }
    const int64_t num_calls = here.num_columns / NextBlock::kStepColumns * num_tiles;
    block.next = NextBlock(address(next.panel, next.column), next, column_bytes, panel_bytes, num_calls);
    const bool are_pairs = here.num_panels == kPanels;
    const auto& by_tokens = is_grouped ? (are_pairs ? grouped_pairs : grouped_singles) : are_pairs ? pairs : singles;
    float* kept = sums + here.index * num_tiles * kTileSums;
    for (int64_t i = first_tile; i < end_tile; ++i, kept += kTileSums) {
      const Tile tile = tokens.tile(i);
      by_tokens[tile.num_tokens - 1](p, tile, block, kept);
    }
  });
}

// Multiply some tiles with a range of panels. Vectors of 8 floats take whole panels if the present and the next one leave
// half of the second-level cache to tokens; wider ones work on pairs of panels.
template <typename Format>
void multiply_part(const LinearProblem& p, const PackedTokens<Format>& tokens, int64_t tile, int64_t end_tile,
                   const PanelPart& here, const PanelPart& ahead) {
  if (tokens.num_tiles() == 1) return multiply_panels(p, tokens, here.panel, here.end_panel);
  if constexpr (std::is_same_v<Format, Floats<float>> && NATIVE_WIDTH == 8) {
    const int64_t panel_bytes = p.num_inputs * kPanelRows * int64_t{sizeof(float)};
    if (4 * panel_bytes <= second_level_bytes()) return multiply_whole_panels(p, tokens, tile, end_tile, here, ahead);
  }
  multiply_blocks(p, tokens, tile, end_tile, here.panel, here.end_panel);
}

}  // namespace NATIVE_ISA
