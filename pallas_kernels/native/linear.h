// Matrix products with packed weights: panels of 16 rows, so that weights stream in order and every vector of them is
// used for many tokens. A token's result is bit-identical whatever the other tokens are: each output is one sum over
// the inputs in their order.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace NATIVE_ISA {

using native::Executor;
using native::kPanelRows;
using native::LinearProblem;
using native::parallel_for;

constexpr int kPanels = NATIVE_WIDTH == 16 ? 2 : 1;  // panels that a tile works on at once
constexpr int kVectors = kPanelRows / NATIVE_WIDTH;  // vectors per panel
constexpr int kMaxTileTokens = NATIVE_WIDTH == 16 ? 12 : NATIVE_WIDTH == 8 ? 6 : 5;  // as many as the registers hold
constexpr int64_t kBlockBytes = 256 << 10;  // packed tokens that stay in a core's second-level cache
constexpr int64_t kSerialProducts = 32 << 10;  // below, waking a thread costs more than it saves
constexpr int64_t kTasksPerThread = 6;

template <typename Number>
struct Unscaled {
  using Weight = Number;
  static F<NATIVE_WIDTH> scales(const float*) { return F<NATIVE_WIDTH>{}; }
  static F<NATIVE_WIDTH> weights(const Number* from, const F<NATIVE_WIDTH>&) { return load<NATIVE_WIDTH>(from); }
};

struct Int8 {
  using Weight = int8_t;
  static F<NATIVE_WIDTH> scales(const float* from) { return load<NATIVE_WIDTH>(from); }
  static F<NATIVE_WIDTH> weights(const int8_t* from, const F<NATIVE_WIDTH>& scales) {
    return load<NATIVE_WIDTH>(from) * scales;
  }
};

// Tokens of one tile as [K, num_tokens].
struct Tile {
  const float* x;
  int64_t first_token;
  int num_tokens;
};

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

// Compute y of `Tokens` tokens for `Panels` panels from `panel` on.
template <typename Format, int Tokens, int Panels>
void multiply(const LinearProblem& p, const Tile& tile, int64_t panel) {
  constexpr int W = NATIVE_WIDTH, V = Panels * kVectors;
  const int64_t panel_size = p.num_inputs * kPanelRows;
  const auto* weights = static_cast<const typename Format::Weight*>(p.weight) + panel * panel_size;
  const float* scales = p.scales + panel * (panel_size / p.scale_block);
  F<W> sums[Tokens][V] = {};
  const float* x = tile.x;
  for (int64_t block = 0; block < p.num_inputs; block += p.scale_block) {
    F<W> scale[V];
    for (int v = 0; v < V; ++v) {
      const int64_t of_panel = v / kVectors * (panel_size / p.scale_block);
      scale[v] = Format::scales(scales + of_panel + block / p.scale_block * kPanelRows + v % kVectors * W);
    }
    for (int64_t k = block; k < block + p.scale_block; ++k, x += Tokens) {
      F<W> w[V];
      for (int v = 0; v < V; ++v) {
        const auto* from = weights + v / kVectors * panel_size + k * kPanelRows + v % kVectors * W;
        w[v] = Format::weights(from, scale[v]);
      }
      for (int t = 0; t < Tokens; ++t) {
        for (int v = 0; v < V; ++v) sums[t][v] += x[t] * w[v];
      }
    }
  }
  if (p.gated) {
    for (int t = 0; t < Tokens; ++t) {
      float lanes[Panels * kPanelRows];
      for (int v = 0; v < V; ++v) store<W>(lanes + v * W, sums[t][v]);
      for (int i = 0; i < Panels; ++i) write_gated(p, tile.first_token + t, panel + i, lanes + i * kPanelRows);
    }
    return;
  }
  for (int v = 0; v < V; ++v) {
    const int64_t n = panel * kPanelRows + v * W, size = p.num_outputs - n;
    const F<W> bias = p.bias ? load_some<W>(p.bias + n, size) : F<W>{};
    for (int t = 0; t < Tokens; ++t) {
      const int64_t at = (tile.first_token + t) * p.num_outputs + n;
      const F<W> residual = p.residual ? load_some<W>(p.residual + at, size) : F<W>{};
      store_some<W>(p.y + at, sums[t][v] + bias + residual, size);
    }
  }
}

using Multiply = void (*)(const LinearProblem&, const Tile&, int64_t);

template <typename Format, int Panels, int... Tokens>
constexpr std::array<Multiply, sizeof...(Tokens)> multiplies(std::integer_sequence<int, Tokens...>) {
  return {multiply<Format, Tokens + 1, Panels>...};
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

// All tokens cut into tiles of nearly equal size, each packed for `multiply`.
class PackedTokens {
 public:
  PackedTokens(Executor& executor, const LinearProblem& p) : p_(p) {
    num_tiles_ = (p.num_tokens + kMaxTileTokens - 1) / kMaxTileTokens;
    if (p.num_tokens == 1 && !p.norm) return;
    static thread_local std::vector<float> buffer;  // kept: a fresh buffer would be page-faulted in at every step
    buffer.resize(std::max<size_t>(buffer.size(), p.num_tokens * p.num_inputs));
    packed_ = buffer.data();
    const bool serial = p.num_tokens * p.num_inputs < kSerialProducts;
    parallel_for(executor, serial ? 1 : num_tiles_, [&](int64_t task) {
      for (int64_t i = task; i < (serial ? num_tiles_ : task + 1); ++i) pack(i);
    });
  }

  int64_t num_tiles() const { return num_tiles_; }

  Tile tile(int64_t index) const {
    const int64_t first = start(index);
    const float* x = packed_ ? packed_ + first * p_.num_inputs : p_.x;
    return {x, first, static_cast<int>(start(index + 1) - first)};
  }

 private:
  int64_t start(int64_t index) const { return index * p_.num_tokens / num_tiles_; }

  void pack(int64_t index) const {
    const int64_t first = start(index), num_tokens = start(index + 1) - first, K = p_.num_inputs;
    float* to = packed_ + first * K;
    static thread_local std::vector<float> buffer;
    buffer.resize(std::max<size_t>(buffer.size(), num_tokens * K));
    std::array<const float*, kMaxTileTokens> from;
    for (int64_t t = 0; t < num_tokens; ++t) from[t] = prepare(p_, first + t, buffer.data() + t * K);
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t t = 0; t < num_tokens; ++t) *to++ = from[t][k];
    }
  }

  const LinearProblem& p_;
  float* packed_ = nullptr;
  int64_t num_tiles_;
};

// A task is a block of tiles times a range of panels: its tokens stay in the second-level cache while its weights
// stream by, and each of its panels stays in the first-level cache while the tiles pass.
template <typename Format>
void linear(Executor& executor, const LinearProblem& p) {
  static constexpr auto pairs = multiplies<Format, kPanels>(std::make_integer_sequence<int, kMaxTileTokens>{});
  static constexpr auto singles = multiplies<Format, 1>(std::make_integer_sequence<int, kMaxTileTokens>{});
  const PackedTokens tokens(executor, p);
  const int64_t panel_outputs = p.gated ? kPanelRows / 2 : kPanelRows;
  const int64_t num_panels = (p.num_outputs + panel_outputs - 1) / panel_outputs;
  const int64_t tile_bytes = p.num_inputs * kMaxTileTokens * sizeof(float);
  const int64_t block_tiles = std::max<int64_t>(1, kBlockBytes / tile_bytes);
  const int64_t num_blocks = (tokens.num_tiles() + block_tiles - 1) / block_tiles;
  const bool serial = p.num_tokens * num_panels * kPanelRows * p.num_inputs < kSerialProducts;
  const int64_t wanted_tasks = serial ? 1 : executor.num_threads() * kTasksPerThread;
  const int64_t wanted_ranges = std::max<int64_t>(1, wanted_tasks / num_blocks);
  const int64_t range = ((num_panels + wanted_ranges - 1) / wanted_ranges + kPanels - 1) / kPanels * kPanels;
  const int64_t num_ranges = (num_panels + range - 1) / range;

  parallel_for(executor, num_blocks * num_ranges, [&](int64_t task) {
    const int64_t first_tile = task % num_blocks * block_tiles;
    const int64_t end_tile = std::min(first_tile + block_tiles, tokens.num_tiles());
    const int64_t first_panel = task / num_blocks * range, end_panel = std::min(first_panel + range, num_panels);
    for (int64_t panel = first_panel; panel < end_panel; panel += kPanels) {
      const auto& by_tokens = panel + kPanels <= end_panel ? pairs : singles;
      for (int64_t i = first_tile; i < end_tile; ++i) {
        const Tile tile = tokens.tile(i);
        by_tokens[tile.num_tokens - 1](p, tile, panel);
      }
    }
  });
}

inline void linear_of_any_format(Executor& executor, const LinearProblem& p) {
  switch (p.format) {
    case native::WeightFormat::kFloat32: return linear<Unscaled<float>>(executor, p);
    case native::WeightFormat::kBFloat16: return linear<Unscaled<BFloat16>>(executor, p);
    case native::WeightFormat::kInt8: return linear<Int8>(executor, p);
  }
}

}  // namespace NATIVE_ISA
