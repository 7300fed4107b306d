// What products with packed weights share: the panels of a matrix, inputs, and outputs from finished sums.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels.h"
#include "scaled.h"
#include "simd.h"

namespace NATIVE_ISA {

using native::Executor;
using native::InputFormat;
using native::kPanelRows;
using native::LinearProblem;
using native::parallel_for;

constexpr int kPanels = NATIVE_WIDTH == 16 ? 2 : 1;  // panels that a full tile works on at once
constexpr int kVectors = kPanelRows / NATIVE_WIDTH;  // vectors per panel
constexpr int64_t kGroupPanels = 8;  // panels that pass the same columns of tokens, which stay in the second-level cache
constexpr int64_t kCachedTokens = 264;  // tokens whose columns and sums stay there
constexpr int64_t kLineBytes = 64, kPrefetchBytes = 2048;
constexpr int64_t kAheadColumns = 4;  // columns between two fetches of the next panel
constexpr int64_t kSerialProducts = 32 << 10;  // below, waking a thread costs more than it saves
constexpr int64_t kTasksPerThread = 6;

// Return the bytes of a core's second-level cache.
inline int64_t second_level_bytes() {
  static const int64_t num_bytes = [] {
    int64_t whole = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
    whole = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return whole > 0 ? whole : 256 << 10;  // 0 or -1 if it is unknown
  }();
  return num_bytes;
}

// Return two thirds of the bytes of a core's first-level cache, for weights that stay there while many tokens pass.
inline int64_t cached_bytes() {
  static const int64_t num_bytes = [] {
    int64_t whole = 0;
#ifdef _SC_LEVEL1_DCACHE_SIZE
    whole = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#endif
    return (whole > 0 ? whole : 32 << 10) * 2 / 3;  // 0 or -1 if it is unknown
  }();
  return num_bytes;
}

inline int64_t num_panels(const LinearProblem& p) {
  const int64_t panel_outputs = p.gated ? kPanelRows / 2 : kPanelRows;
  return (p.num_outputs + panel_outputs - 1) / panel_outputs;
}

// Fetch the lines of V vectors' panels that are needed some time later. A core's own prefetcher stops at each page.
template <int V, typename Element>
inline NATIVE_INLINE void prefetch(const Element* from, int64_t stride, int64_t distance = kPrefetchBytes) {
  for (int v = 0; v < V; v += kVectors) {
    __builtin_prefetch(reinterpret_cast<const char*>(from + v / kVectors * stride) + distance);
  }
}

// Some columns of some panels, the index-th such block of its group of panels; without panels behind the last.
struct PanelBlock {
  int64_t panel, num_panels, column, num_columns, index;
};

// Call use(block, next) for all blocks of a range of panels: groups of panels pass the same columns of tokens one after
// the other. `at_once` panels are a block, or one panel if fewer are left.
template <typename Use>
void each_block(int64_t first_panel, int64_t end_panel, int64_t group_panels, int64_t at_once, int64_t num_inputs,
                int64_t columns, const Use& use) {
  const auto group_of = [&](int64_t panel) {
    return first_panel + (panel - first_panel) / group_panels * group_panels;
  };
  const auto block_at = [&](int64_t panel, int64_t column, int64_t index) {
    const int64_t left = std::min(group_of(panel) + group_panels, end_panel) - panel;
    return PanelBlock{panel, left >= at_once ? at_once : std::min<int64_t>(left, 1), column,
                      std::min(columns, num_inputs - column), index};
  };
  PanelBlock block = block_at(first_panel, 0, 0);
  while (block.num_panels > 0) {
    const int64_t group = group_of(block.panel), end = std::min(group + group_panels, end_panel), panel = block.panel + block.num_panels;
    const int64_t column = block.column + block.num_columns;
    const PanelBlock next = panel < end             ? block_at(panel, block.column, block.index + 1)
                            : column < num_inputs ? block_at(group, column, 0)
                                                    : block_at(end, 0, 0);
    use(block, next);
    block = next;
  }
}

// Weights of the next block, fetched to the second-level cache some lines at a time while tiles pass the present block:
// reading and computing overlap.
class NextBlock {
 public:
  static constexpr int64_t kStepColumns = 16;  // columns between two calls of `fetch`

  NextBlock() = default;
  // Fetch the next block in `num_calls` calls, from its first panel's address on.
  NextBlock(const void* from, const PanelBlock& next, int64_t column_bytes, int64_t panel_bytes, int64_t num_calls)
      : from_(static_cast<const char*>(from)), panel_bytes_(panel_bytes), num_panels_(next.num_panels) {
    const int64_t num_bytes = next.num_panels > 0 ? next.num_columns * column_bytes : 0;
    num_calls = std::max<int64_t>(1, num_calls);
    end_ = from_ + num_bytes;
    call_bytes_ = ((num_bytes + num_calls - 1) / num_calls + kLineBytes - 1) / kLineBytes * kLineBytes;
  }

  inline NATIVE_INLINE void fetch() {
    for (const char* end = std::min(from_ + call_bytes_, end_); from_ < end; from_ += kLineBytes) {
      for (int64_t i = 0; i < num_panels_; ++i) __builtin_prefetch(from_ + i * panel_bytes_, 0, 2);
    }
  }

 private:
  const char *from_ = nullptr, *end_ = nullptr;
  int64_t panel_bytes_ = 0, num_panels_ = 0, call_bytes_ = 0;
};

// Return how many elements of memory a group of columns takes in one row of a panel.
template <typename Format>
int64_t group_elements(int64_t size) {
  return (size + Format::kElementColumns - 1) / Format::kElementColumns;
}

// Scales and zero points of one group of some panels.
template <int V>
struct GroupScales {
  F<NATIVE_WIDTH> scales[V], zeros[V];

  GroupScales(const LinearProblem& p, bool has_zeros, int64_t num_groups, int64_t panel, int64_t group) {
    constexpr int W = NATIVE_WIDTH;
    for (int v = 0; v < V; ++v) {
      const int64_t at = ((panel + v / kVectors) * num_groups + group) * kPanelRows + v % kVectors * W;
      scales[v] = load<W>(p.scales + at);
      if (has_zeros) zeros[v] = p.zeros ? load<W>(p.zeros + at) : all<W>(8.0f);
    }
  }
};

// Write `W` outputs of a gated matrix, from the n-th one on.
template <int W>
inline NATIVE_INLINE void write_gated(const LinearProblem& p, int64_t token, int64_t n, const F<W>& gate_sums,
                                      const F<W>& up_sums) {
  const auto bias = [&](int64_t n, int64_t size) { return p.bias ? load_some<W>(p.bias + n, size) : F<W>{}; };
  const int64_t size = p.num_outputs - n, at = token * p.num_outputs + n;
  const F<W> gate = gate_sums + bias(n, size), up = up_sums + bias(p.num_outputs + n, size);
  const F<W> residual = p.residual ? load_some<W>(p.residual, at, size) : F<W>{};
  store_some<W>(p.y, at, fma<W>(silu<W>(gate), up, residual), size);
}

#ifdef __AVX512F__
// Write outputs of a gated matrix from a token's sums for two panels.
inline NATIVE_INLINE void write_gated_pair(const LinearProblem& p, int64_t token, int64_t panel, const F<16>& first,
                                           const F<16>& second) {
  const __m512 gate = _mm512_shuffle_f32x4((__m512)first, (__m512)second, 0x44);  // lower halves, then upper ones
  const __m512 up = _mm512_shuffle_f32x4((__m512)first, (__m512)second, 0xee);
  write_gated<16>(p, token, panel * (kPanelRows / 2), (F<16>)gate, (F<16>)up);
}
#endif

// Write outputs of a gated matrix from a token's sums for one panel: those of the gate, then as many that it gates.
inline void write_gated(const LinearProblem& p, int64_t token, int64_t panel, const float* sums) {
  constexpr int kOutputs = kPanelRows / 2, W = std::min(NATIVE_WIDTH, kOutputs);
  for (int i = 0; i < kOutputs; i += W) {
    write_gated<W>(p, token, panel * kOutputs + i, load<W>(sums + i), load<W>(sums + kOutputs + i));
  }
}

// Add the terms of some tokens to their sums for a panel, `stride` floats apart; see terms.h.
__attribute__((noinline)) static void add_terms(const LinearProblem& p, int64_t first_token, int64_t num_tokens,
                                                int64_t panel, float* sums, int64_t stride);

// Write y of `Tokens` tokens from their finished sums for the panels from `panel` on.
template <int Tokens, int Panels>
inline NATIVE_INLINE void finish(const LinearProblem& p, int64_t first_token, int64_t panel,
                                 const F<NATIVE_WIDTH> (&sums)[Tokens][Panels * kVectors]) {
  constexpr int W = NATIVE_WIDTH, V = Panels * kVectors;
  if (p.gated) {
#ifdef __AVX512F__
    if constexpr (Panels == 2 && W == 16) {
      for (int t = 0; t < Tokens; ++t) write_gated_pair(p, first_token + t, panel, sums[t][0], sums[t][1]);
      return;
    }
#endif
    constexpr int kOutputs = kPanelRows / 2, kParts = kOutputs / W;  // vectors of a panel's gates, and of what they gate
    if constexpr (kParts > 0) {
      for (int part = 0; part < Panels * kParts; ++part) {
        const int gate = part / kParts * kVectors + part % kParts;
        const int64_t n = panel * kOutputs + part * W;
        for (int t = 0; t < Tokens; ++t) write_gated<W>(p, first_token + t, n, sums[t][gate], sums[t][gate + kParts]);
      }
      return;
    }
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
      const F<W> residual = p.residual ? load_some<W>(p.residual, at, size) : F<W>{};
      store_some<W>(p.y, at, sums[t][v] + bias + residual, size);
    }
  }
}

// `finish` as one function for all formats, after terms are added: inlined, it would be half of each kernel.
template <int Tokens, int Panels>
__attribute__((noinline)) void finish_copy(const LinearProblem& p, int64_t first_token, int64_t panel,
                                           F<NATIVE_WIDTH> (&sums)[Tokens][Panels * kVectors]) {
  if (p.task_terms) {
    float* lanes = reinterpret_cast<float*>(&sums);
    for (int i = 0; i < Panels; ++i) add_terms(p, first_token, Tokens, panel + i, lanes + i * kPanelRows, Panels * kPanelRows);
  }
  finish<Tokens, Panels>(p, first_token, panel, sums);
}

// Write y as `finish` does, by a call. Sums whose address the call took would not stay in registers, hence the copy.
template <int Tokens, int Panels>
inline NATIVE_INLINE void finish_by_call(const LinearProblem& p, int64_t first_token, int64_t panel,
                                         const F<NATIVE_WIDTH> (&sums)[Tokens][Panels * kVectors]) {
  F<NATIVE_WIDTH> copy[Tokens][Panels * kVectors];
  unrolled_pairs<Tokens, Panels * kVectors>([&](int t, int v) NATIVE_INLINE { copy[t][v] = sums[t][v]; });
  finish_copy<Tokens, Panels>(p, first_token, panel, copy);
}

inline float sum_of_squares(const float* x, int64_t size) {
  constexpr int W = NATIVE_WIDTH;
  F<W> sums = {};
  for (int64_t i = 0; i < size; i += W) {
    const F<W> some = load_some<W>(x + i, size - i);
    sums = fma<W>(some, some, sums);  // explicit: compilers contract by context, and not in every copy of this loop
  }
  return sum_lanes<W>(sums);
}

// Write `size` floats rounded to fp8, times their scale: half to even, with 448 steps to the largest magnitude.
inline void round_to_float8(const float* x, int64_t size, float* to) {
  constexpr int W = NATIVE_WIDTH;
  constexpr float kMost = kLargest<Float8>, kSubnormal = 0x1p-6f, kUnits = 0x3p13f;  // adding these rounds to 2^-9
  I<W> most = {};
  for (int64_t k = 0; k < size; k += W) {
    const I<W> magnitude = bits_of<I<W>>(load_some<W>(x + k, size - k)) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  const float exact = bits_of<float>(max_lanes<W>(most)) / kMost, scale = exact == 0 ? 0x1p-23f : exact;
  for (int64_t k = 0; k < size; k += W) {
    const F<W> steps = load_some<W>(x + k, size - k) / scale;
    const F<W> above = steps > kMost ? all<W>(kMost) : steps, bounded = above < -kMost ? all<W>(-kMost) : above;
    const I<W> bits = bits_of<I<W>>(bounded), even = bits >> 20 & 1;
    const F<W> normal = bits_of<F<W>>((bits + 0x7ffff + even) & ~0xfffff);
    const F<W> magnitude = bits_of<F<W>>(bits & 0x7fffffff), units = (bounded + kUnits) - kUnits;
    const F<W> rounded = magnitude < kSubnormal ? units : normal;
    store_some<W>(to + k, (magnitude <= kMost ? rounded : bounded) * scale, size - k);  // NaN stays NaN
  }
}

// Return one token's input to the product as floats; in `buffer` [K] unless it is used as it is in memory.
inline const float* prepare(const LinearProblem& p, int64_t token, float* buffer) {
  constexpr int W = NATIVE_WIDTH;
  const int64_t K = p.num_inputs;
  const native::Activations input = p.x.from((p.rows ? p.rows[token] : token) * K);
  const float* x = static_cast<const float*>(input.data);
  if (input.is_bfloat16) {
    for (int64_t k = 0; k < K; k += W) store_some<W>(buffer + k, load_some<W>(input, k, K - k), K - k);
    x = buffer;
  }
  if (p.norm) {
    const float factor = 1.0f / std::sqrt(sum_of_squares(x, K) / static_cast<float>(K) + p.eps);
    for (int64_t k = 0; k < K; k += W) {
      const F<W> normed = load_some<W>(x + k, K - k) * factor * load_some<W>(p.norm + k, K - k);
      store_some<W>(buffer + k, normed, K - k);
    }
    x = buffer;
  }
  if (p.input_format == InputFormat::kBFloat16) {
    for (int64_t k = 0; k < K; k += W) {
      store_some<W>(buffer + k, rounded_to_bfloat16<W>(load_some<W>(x + k, K - k)), K - k);
    }
    x = buffer;
  }
  if (p.input_format == InputFormat::kFloat8) {
    for (int64_t k = 0; k < K; k += p.group_size) round_to_float8(x + k, p.group_size, buffer + k);
    x = buffer;
  }
  return x;
}

// Return a buffer of the calling thread, kept: a fresh one would be page-faulted in at every step. Each `Use` has one.
template <typename Use>
float* scratch(size_t size) {
  static thread_local std::vector<float> buffer;
  if (buffer.size() < size) buffer.resize(size);
  return buffer.data();
}

// How tokens meet panels: the columns in how many parts, one part of all panels after the other; whether a task has
// as few panels as possible, and all tasks of a block of tokens come after each other.
struct Passes {
  int64_t num_parts = 1;
  bool shares_tokens = false;
};

template <typename Tokens>
inline Passes passes_of(const Tokens&) {
  return {};
}

// Some panels of a matrix, from `panel` on, and a part of their columns.
struct PanelPart {
  int64_t panel, end_panel, part;
};

// Tokens of a product, cut into tiles of nearly equal size.
class Tiles {
 public:
  Tiles(int64_t num_tokens, int64_t most) : num_tokens_(num_tokens), size_((num_tokens + most - 1) / most) {}

  int64_t size() const { return size_; }
  int64_t start(int64_t index) const { return index * num_tokens_ / size_; }

  // Call pack(index) for all tiles, on several threads if there are many inputs.
  template <typename Pack>
  void pack_all(Executor& executor, int64_t num_inputs, const Pack& pack) const {
    const bool serial = num_tokens_ * num_inputs < kSerialProducts;
    parallel_for(executor, serial ? 1 : size_, [&](int64_t task) {
      for (int64_t i = task; i < (serial ? size_ : task + 1); ++i) pack(i);
    });
  }

 private:
  int64_t num_tokens_, size_;
};

}  // namespace NATIVE_ISA
