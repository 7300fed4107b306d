// Matrix products with packed weights: panels of 16 rows, so that weights stream in order and every vector of them is
// used for many tokens. A token's result is bit-identical whatever the other tokens are: each output is one sum over
// the inputs in their order, or over the groups of a quantised matrix in theirs.
//
// Few tokens are one tile, whose sums stay in registers while weights are converted on the way. With more tokens a
// block of columns of some panels is converted to floats once, stays in the first-level cache while all tiles pass, and
// the sums wait in the second-level cache between blocks.
//
// Groups of tokens with weights of their own are as many products, whose tasks the threads share. The weights of a group
// without tokens are not read.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace NATIVE_ISA {

using native::Executor;
using native::GroupedProblem;
using native::kPanelRows;
using native::LinearProblem;
using native::parallel_for;

constexpr int kPanels = NATIVE_WIDTH == 16 ? 2 : 1;  // panels that a full tile works on at once
constexpr int kVectors = kPanelRows / NATIVE_WIDTH;  // vectors per panel
constexpr int kMaxTileTokens = NATIVE_WIDTH == 16 ? 12 : NATIVE_WIDTH == 8 ? 6 : 5;  // as many as the registers hold
constexpr int64_t kBlockColumns = 256 / kPanels;  // columns of panels that stay in a core's first-level cache
constexpr int64_t kGroupPanels = 8;  // panels that pass the same columns of tokens, which stay in the second-level cache
constexpr int64_t kTaskTokens = 264;  // tokens whose columns and sums stay there
constexpr int64_t kLineBytes = 64, kPrefetchBytes = 2048;
constexpr int64_t kSerialProducts = 32 << 10;  // below, waking a thread costs more than it saves
constexpr int64_t kTasksPerThread = 6;

#define NATIVE_INLINE __attribute__((always_inline))

// Fetch the lines of V vectors' panels that are needed some time later. A core's own prefetcher stops at each page.
template <int V, typename Element>
inline NATIVE_INLINE void prefetch(const Element* from, int64_t stride) {
  for (int v = 0; v < V; v += kVectors) {
    __builtin_prefetch(reinterpret_cast<const char*>(from + v / kVectors * stride) + kPrefetchBytes);
  }
}

// A weight format has
//   Weight, kElementColumns: an element of memory, and the columns in one
//   kGrouped, kHasZeros: whether groups of columns have scales, and zero points
//   each<V, FromMemory>(from, stride, size, use): call use(k, weights) for `size` columns of V vectors, with `stride`
//     elements per panel; FromMemory if they are in no cache yet
template <typename Number>
struct Floats {
  using Weight = Number;
  static constexpr int kElementColumns = 1;
  static constexpr bool kGrouped = false, kHasZeros = false;

  static constexpr int64_t kLineColumns = std::max<int64_t>(1, kLineBytes / (kPanelRows * sizeof(Number)));

  template <int V, bool FromMemory, typename Use>
  static inline NATIVE_INLINE void each(const Number* from, int64_t stride, int64_t size, const Use& use) {
    constexpr int W = NATIVE_WIDTH;
    const auto use_one = [&](int64_t k) NATIVE_INLINE {
      F<W> w[V];
      for (int v = 0; v < V; ++v) w[v] = load<W>(from + v / kVectors * stride + k * kPanelRows + v % kVectors * W);
      use(k, w);
    };
    int64_t k = 0;
    for (; k + kLineColumns <= size; k += kLineColumns) {
      if constexpr (FromMemory) prefetch<V>(from + k * kPanelRows, stride);
      for (int i = 0; i < kLineColumns; ++i) use_one(k + i);
    }
    for (; k < size; ++k) use_one(k);
  }
};

struct Int8 : Floats<int8_t> {
  static constexpr bool kGrouped = true;
};

// Elements are masked in place, without a shift: those of column k are 16^(k % 4) times as large, and inputs as much
// smaller, which is exact.
struct Int4 {
  using Weight = uint32_t;
  static constexpr int kElementColumns = 8;
  static constexpr bool kGrouped = true, kHasZeros = true;
  static constexpr std::array<float, 4> kFactors = {1.0f, 1.0f / 16, 1.0f / 256, 1.0f / 4096};

  template <int V, bool FromMemory, typename Use>
  static inline NATIVE_INLINE void each(const uint32_t* from, int64_t stride, int64_t size, const Use& use) {
    constexpr int W = NATIVE_WIDTH;
    I<W> words[V];
    const auto read = [&]() NATIVE_INLINE {
      for (int v = 0; v < V; ++v) words[v] = load_words<W>(from + v / kVectors * stride + v % kVectors * W);
      if constexpr (FromMemory) prefetch<V>(from, stride);
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

// Return how many elements of memory a group of columns takes in one row of a panel.
template <typename Format>
int64_t group_elements(int64_t size) {
  return (size + Format::kElementColumns - 1) / Format::kElementColumns;
}

// Write outputs of a gated matrix from a token's sums for one panel: those of the gate, then as many that it gates.
inline void write_gated(const LinearProblem& p, int64_t token, int64_t panel, const float* sums) {
  constexpr int kOutputs = kPanelRows / 2, W = std::min(NATIVE_WIDTH, kOutputs);
  const auto bias = [&](int64_t n, int64_t size) { return p.bias ? load_some<W>(p.bias + n, size) : F<W>{}; };
  for (int i = 0; i < kOutputs; i += W) {
    const int64_t n = panel * kOutputs + i, size = p.num_outputs - n, at = token * p.num_outputs + n;
    const F<W> gate = load<W>(sums + i) + bias(n, size);
    const F<W> up = load<W>(sums + kOutputs + i) + bias(p.num_outputs + n, size);
    const F<W> residual = p.residual ? load_some<W>(p.residual + at, size) : F<W>{};
    store_some<W>(p.y + at, silu<W>(gate) * up + residual, size);
  }
}

// Add the products of `size` columns to the sums.
template <typename Format, bool FromMemory, int Tokens, int V>
inline NATIVE_INLINE void accumulate(F<NATIVE_WIDTH> (&sums)[Tokens][V], const typename Format::Weight* from,
                                     int64_t stride, int64_t size, const float* x) {
  constexpr int W = NATIVE_WIDTH;
  Format::template each<V, FromMemory>(from, stride, size, [&](int64_t k, const F<W>(&w)[V]) NATIVE_INLINE {
    for (int t = 0; t < Tokens; ++t) {
      const F<W> input = all<W>(x[k * Tokens + t]);
      for (int v = 0; v < V; ++v) sums[t][v] = fma<W>(input, w[v], sums[t][v]);
    }
  });
}

// Scales and zero points of one group of some panels.
template <int V>
struct GroupScales {
  F<NATIVE_WIDTH> scales[V], zeros[V];

  GroupScales(const LinearProblem& p, bool has_zeros, int64_t panel, int64_t group) {
    constexpr int W = NATIVE_WIDTH;
    const int64_t num_groups = p.num_inputs / p.group_size;
    for (int v = 0; v < V; ++v) {
      const int64_t at = ((panel + v / kVectors) * num_groups + group) * kPanelRows + v % kVectors * W;
      scales[v] = load<W>(p.scales + at);
      if (has_zeros) zeros[v] = p.zeros ? load<W>(p.zeros + at) : all<W>(8.0f);
    }
  }
};

// Add the sums over one group to those of the row. `group_sums` are the tokens' sums of inputs; null for no zeros.
template <int Tokens, int V>
inline NATIVE_INLINE void add_group(F<NATIVE_WIDTH> (&sums)[Tokens][V], const F<NATIVE_WIDTH> (&part)[Tokens][V],
                                    const GroupScales<V>& group, const float* group_sums) {
  constexpr int W = NATIVE_WIDTH;
  for (int t = 0; t < Tokens; ++t) {
    for (int v = 0; v < V; ++v) {
      const F<W> sum = group_sums ? fma<W>(all<W>(-group_sums[t]), group.zeros[v], part[t][v]) : part[t][v];
      sums[t][v] = fma<W>(group.scales[v], sum, sums[t][v]);
    }
  }
}

// Write y of `Tokens` tokens from their finished sums for the panels from `panel` on.
template <int Tokens, int Panels>
inline NATIVE_INLINE void finish(const LinearProblem& p, int64_t first_token, int64_t panel,
                                 const F<NATIVE_WIDTH> (&sums)[Tokens][Panels * kVectors]) {
  constexpr int W = NATIVE_WIDTH, V = Panels * kVectors;
  if (p.gated) {
    for (int t = 0; t < Tokens; ++t) {
      float lanes[Panels * kPanelRows];
      for (int v = 0; v < V; ++v) store<W>(lanes + v * W, sums[t][v]);
      for (int i = 0; i < Panels; ++i) write_gated(p, first_token + t, panel + i, lanes + i * kPanelRows);
    }
    return;
  }
  for (int v = 0; v < V; ++v) {
    const int64_t n = panel * kPanelRows + v * W, size = p.num_outputs - n;
    const F<W> bias = p.bias ? load_some<W>(p.bias + n, size) : F<W>{};
    for (int t = 0; t < Tokens; ++t) {
      const int64_t at = (first_token + t) * p.num_outputs + n;
      const F<W> residual = p.residual ? load_some<W>(p.residual + at, size) : F<W>{};
      store_some<W>(p.y + at, sums[t][v] + bias + residual, size);
    }
  }
}

// Compute y of a tile for `Panels` panels from `panel` on.
template <typename Format, int Tokens, int Panels>
void multiply(const LinearProblem& p, const Tile& tile, int64_t panel) {
  constexpr int V = Panels * kVectors;
  const int64_t group_size = p.group_size, num_groups = p.num_inputs / group_size;
  const int64_t group_stride = group_elements<Format>(group_size) * kPanelRows, stride = num_groups * group_stride;
  const auto* from = static_cast<const typename Format::Weight*>(p.weight) + panel * stride;
  F<NATIVE_WIDTH> sums[Tokens][V] = {};
  if constexpr (Format::kGrouped) {
    for (int64_t group = 0; group < num_groups; ++group) {
      F<NATIVE_WIDTH> part[Tokens][V] = {};
      accumulate<Format, true>(part, from + group * group_stride, stride, group_size, tile.x + group * group_size * Tokens);
      const float* group_sums = tile.group_sums ? tile.group_sums + group * Tokens : nullptr;
      add_group(sums, part, GroupScales<V>(p, Format::kHasZeros, panel, group), group_sums);
    }
  } else {
    accumulate<Format, true>(sums, from, stride, p.num_inputs, tile.x);
  }
  finish<Tokens, Panels>(p, tile.first_token, panel, sums);
}

// Columns of some panels as floats.
struct ColumnBlock {
  const float* weights;  // [panels][columns, 16]
  int64_t stride;        // floats per panel
  int64_t panel, first_column, num_columns;
};

// Add one block's products to a tile's sums [Tokens, V], and write y after the last block.
template <bool Grouped, int Tokens, int Panels>
void multiply_block(const LinearProblem& p, const Tile& tile, const ColumnBlock& block, float* kept) {
  constexpr int W = NATIVE_WIDTH, V = Panels * kVectors;
  F<W> sums[Tokens][V] = {};
  if (block.first_column > 0) {
    for (int t = 0; t < Tokens; ++t) {
      for (int v = 0; v < V; ++v) sums[t][v] = load<W>(kept + (t * V + v) * W);
    }
  }
  const float* x = tile.x + block.first_column * Tokens;
  if constexpr (Grouped) {
    for (int64_t k = 0; k < block.num_columns; k += p.group_size) {
      F<W> part[Tokens][V] = {};
      accumulate<Floats<float>, false>(part, block.weights + k * kPanelRows, block.stride, p.group_size, x + k * Tokens);
      const int64_t group = (block.first_column + k) / p.group_size;
      const float* group_sums = tile.group_sums ? tile.group_sums + group * Tokens : nullptr;
      add_group(sums, part, GroupScales<V>(p, group_sums != nullptr, block.panel, group), group_sums);
    }
  } else {
    accumulate<Floats<float>, false>(sums, block.weights, block.stride, block.num_columns, x);
  }
  if (block.first_column + block.num_columns == p.num_inputs) {
    finish<Tokens, Panels>(p, tile.first_token, block.panel, sums);
  } else {
    for (int t = 0; t < Tokens; ++t) {
      for (int v = 0; v < V; ++v) store<W>(kept + (t * V + v) * W, sums[t][v]);
    }
  }
}

// Write columns of one panel as floats [columns, 16]; in a grouped format they are whole groups.
template <typename Format>
void convert(const typename Format::Weight* from, int64_t num_columns, int64_t group_size, float* to) {
  constexpr int W = NATIVE_WIDTH;
  const int64_t step = Format::kGrouped ? group_size : num_columns;
  for (int64_t column = 0; column < num_columns; column += step, to += step * kPanelRows) {
    Format::template each<kVectors, true>(from, 0, step, [&](int64_t k, const F<W>(&w)[kVectors]) NATIVE_INLINE {
      for (int v = 0; v < kVectors; ++v) store<W>(to + k * kPanelRows + v * W, w[v]);
    });
    from += group_elements<Format>(step) * kPanelRows;
  }
}

inline float sum_of_squares(const float* x, int64_t size) {
  constexpr int W = NATIVE_WIDTH;
  F<W> sums = {};
  for (int64_t i = 0; i < size; i += W) {
    const F<W> some = load_some<W>(x + i, size - i);
    sums += some * some;
  }
  return sum_lanes<W>(sums);
}

// Return one token's input to the product; a normalised one is computed in `buffer` [K].
inline const float* prepare(const LinearProblem& p, int64_t token, float* buffer) {
  constexpr int W = NATIVE_WIDTH;
  const int64_t K = p.num_inputs;
  const float* x = p.x + token * K;
  if (!p.norm) return x;
  const float factor = 1.0f / std::sqrt(sum_of_squares(x, K) / static_cast<float>(K) + p.eps);
  for (int64_t k = 0; k < K; k += W) {
    const F<W> normed = load_some<W>(x + k, K - k) * factor * load_some<W>(p.norm + k, K - k);
    store_some<W>(buffer + k, normed, K - k);
  }
  return buffer;
}

// Return the panels that a lone tile works on at once: for few tokens several, so that additions do not wait for each
// other.
constexpr int lone_panels(int num_tokens) {
  constexpr int kSums = kMaxTileTokens * kPanels;  // panels of sums that the registers hold
  const int most = NATIVE_WIDTH == 16 ? 4 : 2;
  return num_tokens * most <= kSums ? most : kPanels;
}

using Multiply = void (*)(const LinearProblem&, const Tile&, int64_t);
using MultiplyBlock = void (*)(const LinearProblem&, const Tile&, const ColumnBlock&, float*);
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

// Return a buffer of the calling thread, kept: a fresh one would be page-faulted in at every step. Each `Use` has one.
template <typename Use>
float* scratch(size_t size) {
  static thread_local std::vector<float> buffer;
  if (buffer.size() < size) buffer.resize(size);
  return buffer.data();
}

// All tokens cut into tiles of nearly equal size, each packed for `accumulate` in a buffer of `size(p)` floats.
template <typename Format>
class PackedTokens {
 public:
  static int64_t size(const LinearProblem& p) {
    if (p.num_tokens == 1 && !p.norm && !Format::kHasZeros) return 0;  // used as it is
    return p.num_tokens * (p.num_inputs + (Format::kHasZeros ? p.num_inputs / p.group_size : 0));
  }

  PackedTokens(Executor& executor, const LinearProblem& p, float* buffer)
      : p_(p), num_groups_(p.num_inputs / p.group_size) {
    num_tiles_ = (p.num_tokens + kMaxTileTokens - 1) / kMaxTileTokens;
    if (size(p) == 0) return;
    const int64_t num_inputs = p.num_tokens * p.num_inputs;
    packed_ = buffer;
    group_sums_ = Format::kHasZeros ? packed_ + num_inputs : nullptr;
    const bool serial = num_inputs < kSerialProducts;
    parallel_for(executor, serial ? 1 : num_tiles_, [&](int64_t task) {
      for (int64_t i = task; i < (serial ? num_tiles_ : task + 1); ++i) pack(i);
    });
  }

  int64_t num_tiles() const { return num_tiles_; }

  Tile tile(int64_t index) const {
    const int64_t first = start(index);
    const float* x = packed_ ? packed_ + first * p_.num_inputs : p_.x;
    const float* group_sums = group_sums_ ? group_sums_ + first * num_groups_ : nullptr;
    return {x, group_sums, first, static_cast<int>(start(index + 1) - first)};
  }

 private:
  int64_t start(int64_t index) const { return index * p_.num_tokens / num_tiles_; }

  void pack(int64_t index) const {
    const int64_t first = start(index), num_tokens = start(index + 1) - first, K = p_.num_inputs;
    float* to = packed_ + first * K;
    struct Prepared;
    float* buffer = scratch<Prepared>(num_tokens * K);
    std::array<const float*, kMaxTileTokens> from;
    for (int64_t t = 0; t < num_tokens; ++t) {
      from[t] = prepare(p_, first + t, buffer + t * K);
      if constexpr (Format::kHasZeros) {
        sum_groups(from[t], group_sums_ + first * num_groups_ + t, num_tokens);
        from[t] = scale_inputs(from[t], buffer + t * K);
      }
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
  int64_t num_groups_, num_tiles_;
  float *packed_ = nullptr, *group_sums_ = nullptr;
};

// Multiply a lone tile with a range of panels.
template <typename Format>
void multiply_panels(const LinearProblem& p, const Tile& tile, int64_t panel, int64_t end_panel) {
  static constexpr auto several = lone_tiles<Format>(TokenCounts{});
  static constexpr auto single = lone_tiles_of_one_panel<Format>(TokenCounts{});
  const int num_panels = lone_panels(tile.num_tokens);
  for (; panel + num_panels <= end_panel; panel += num_panels) several[tile.num_tokens - 1](p, tile, panel);
  for (; panel < end_panel; ++panel) single[tile.num_tokens - 1](p, tile, panel);
}

// Multiply some tiles with a range of panels, block by block.
template <typename Format>
void multiply_blocks(const LinearProblem& p, const PackedTokens<Format>& tokens, int64_t first_tile, int64_t end_tile,
                     int64_t first_panel, int64_t end_panel) {
  static constexpr auto pairs = blocks<Format::kGrouped, kPanels>(TokenCounts{});
  static constexpr auto singles = blocks<Format::kGrouped, 1>(TokenCounts{});
  constexpr int64_t kTileSums = kMaxTileTokens * kPanels * kPanelRows;
  const int64_t K = p.num_inputs, unit = Format::kGrouped ? p.group_size : 1;
  const int64_t group_stride = group_elements<Format>(p.group_size) * kPanelRows;
  const int64_t stride = K / p.group_size * group_stride;  // elements per panel
  const int64_t columns = std::max<int64_t>(1, kBlockColumns / unit) * unit;  // whole groups
  const int64_t num_tiles = end_tile - first_tile;
  struct Sums;
  float* sums = scratch<Sums>(columns < K ? (kGroupPanels / kPanels + 1) * num_tiles * kTileSums : 0);
  struct Converted;
  float* converted = scratch<Converted>(kPanels * columns * kPanelRows);
  const auto* weights = static_cast<const typename Format::Weight*>(p.weight);

  for (int64_t group = first_panel; group < end_panel; group += kGroupPanels) {
    const int64_t end = std::min(group + kGroupPanels, end_panel);
    for (int64_t column = 0; column < K; column += columns) {
      float* kept = sums;
      const int64_t num_columns = std::min(columns, K - column);
      for (int64_t panel = group; panel < end;) {
        const int num_panels = panel + kPanels <= end ? kPanels : 1;
        ColumnBlock block{converted, columns * kPanelRows, panel, column, num_columns};
        if constexpr (std::is_same_v<Format, Floats<float>>) {
          block.weights = weights + panel * stride + column * kPanelRows;
          block.stride = stride;
        } else {
          for (int i = 0; i < num_panels; ++i) {
            const auto* from = weights + (panel + i) * stride + column / unit * (unit == 1 ? kPanelRows : group_stride);
            convert<Format>(from, num_columns, p.group_size, converted + i * block.stride);
          }
        }
        const auto& by_tokens = num_panels == kPanels ? pairs : singles;
        for (int64_t i = first_tile; i < end_tile; ++i, kept += kTileSums) {
          const Tile tile = tokens.tile(i);
          by_tokens[tile.num_tokens - 1](p, tile, block, kept);
        }
        panel += num_panels;
      }
    }
  }
}

inline int64_t num_panels(const LinearProblem& p) {
  const int64_t panel_outputs = p.gated ? kPanelRows / 2 : kPanelRows;
  return (p.num_outputs + panel_outputs - 1) / panel_outputs;
}

// Return as many tasks as keep all threads busy to the end; one for little work.
inline int64_t wanted_tasks(const Executor& executor, const LinearProblem& p) {
  const bool serial = p.num_tokens * num_panels(p) * kPanelRows * p.num_inputs < kSerialProducts;
  return serial ? 1 : executor.num_threads() * kTasksPerThread;
}

// A product cut into tasks. A task is a range of panels, with many tokens times a block of tiles.
template <typename Format>
class Product {
 public:
  Product(Executor& executor, const LinearProblem& p, float* buffer, int64_t wanted_tasks)
      : p_(p), tokens_(executor, p, buffer), num_panels_(num_panels(p)) {
    num_blocks_ = (p.num_tokens + kTaskTokens - 1) / kTaskTokens;
    const int64_t wanted_ranges = std::max<int64_t>(1, wanted_tasks / num_blocks_);
    range_ = ((num_panels_ + wanted_ranges - 1) / wanted_ranges + kPanels - 1) / kPanels * kPanels;
  }

  int64_t num_tasks() const { return num_blocks_ * ((num_panels_ + range_ - 1) / range_); }

  void run(int64_t task) const {
    const int64_t block = task % num_blocks_, num_tiles = tokens_.num_tiles();
    const int64_t first_panel = task / num_blocks_ * range_, end_panel = std::min(first_panel + range_, num_panels_);
    if (num_tiles == 1) return multiply_panels<Format>(p_, tokens_.tile(0), first_panel, end_panel);
    const int64_t first_tile = block * num_tiles / num_blocks_, end_tile = (block + 1) * num_tiles / num_blocks_;
    multiply_blocks<Format>(p_, tokens_, first_tile, end_tile, first_panel, end_panel);
  }

 private:
  const LinearProblem& p_;
  PackedTokens<Format> tokens_;
  int64_t num_panels_, num_blocks_, range_;
};

template <typename Format>
void linear(Executor& executor, const LinearProblem& p) {
  if (p.num_tokens == 0) return;
  float* buffer = scratch<PackedTokens<Format>>(PackedTokens<Format>::size(p));
  const Product<Format> product(executor, p, buffer, wanted_tasks(executor, p));
  parallel_for(executor, product.num_tasks(), [&](int64_t task) { product.run(task); });
}

// Return the products of the groups that have tokens.
template <typename Format>
std::vector<LinearProblem> group_problems(const GroupedProblem& p) {
  const int64_t K = p.all.num_inputs, num_groups = K / p.all.group_size;
  const int64_t matrix_rows = num_panels(p.all) * kPanelRows, matrix_scales = matrix_rows * num_groups;
  const int64_t matrix_elements = matrix_scales * group_elements<Format>(p.all.group_size);
  std::vector<LinearProblem> products;
  for (int64_t g = 0, first = 0; g < p.num_groups; first += p.group_sizes[g++]) {
    if (p.group_sizes[g] == 0) continue;
    LinearProblem product = p.all;
    product.num_tokens = p.group_sizes[g];
    product.x += first * K;
    product.y += first * product.num_outputs;
    product.weight = static_cast<const typename Format::Weight*>(product.weight) + g * matrix_elements;
    if (product.scales) product.scales += g * matrix_scales;
    if (product.zeros) product.zeros += g * matrix_scales;
    products.push_back(product);
  }
  return products;
}

template <typename Format>
void grouped_linear(Executor& executor, const GroupedProblem& p) {
  const std::vector<LinearProblem> problems = group_problems<Format>(p);
  int64_t size = 0, num_tokens = 0, num_tasks = 0;
  for (const LinearProblem& problem : problems) {
    size += PackedTokens<Format>::size(problem);
    num_tokens += problem.num_tokens;
  }
  std::fill(p.all.y + num_tokens * p.all.num_outputs, p.all.y + p.all.num_tokens * p.all.num_outputs, 0.0f);
  float* buffer = scratch<PackedTokens<Format>>(size);
  const int64_t wanted = wanted_tasks(executor, p.all);
  std::vector<Product<Format>> products;
  std::vector<int64_t> ends;  // tasks of each product and of those before it
  products.reserve(problems.size());
  for (const LinearProblem& problem : problems) {
    products.emplace_back(executor, problem, buffer, (wanted * problem.num_tokens + num_tokens - 1) / num_tokens);
    buffer += PackedTokens<Format>::size(problem);
    ends.push_back(num_tasks += products.back().num_tasks());
  }
  // Little work is one task for one thread.
  const int64_t step = wanted == 1 ? std::max<int64_t>(1, num_tasks) : 1;
  parallel_for(executor, num_tasks / step, [&](int64_t first) {
    for (int64_t task = first * step; task < (first + 1) * step; ++task) {
      const int64_t i = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
      products[i].run(task - (i == 0 ? 0 : ends[i - 1]));
    }
  });
}

// Call a function template with the type of a weight format.
#define NATIVE_BY_FORMAT(function, format, ...)                                              \
  switch (format) {                                                                          \
    case native::WeightFormat::kFloat32: return function<Floats<float>>(__VA_ARGS__);        \
    case native::WeightFormat::kBFloat16: return function<Floats<BFloat16>>(__VA_ARGS__);    \
    case native::WeightFormat::kFloat16: return function<Floats<Float16>>(__VA_ARGS__);      \
    case native::WeightFormat::kInt8: return function<Int8>(__VA_ARGS__);                    \
    case native::WeightFormat::kInt4: return function<Int4>(__VA_ARGS__);                    \
  }

inline void linear_of_any_format(Executor& executor, const LinearProblem& p) {
  NATIVE_BY_FORMAT(linear, p.format, executor, p)
}

inline void grouped_linear_of_any_format(Executor& executor, const GroupedProblem& p) {
  NATIVE_BY_FORMAT(grouped_linear, p.all.format, executor, p)
}

}  // namespace NATIVE_ISA
