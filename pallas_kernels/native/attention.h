// Ragged paged attention with an online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022).
//
// A tile is a few queries with all query heads of one KV head, i.e. query vectors that read the same keys. Its queries
// belong to one row, or to several rows whose first pages are the same (as in Hydragen, Juravsky et al., 2024): shared
// pages are read once for all of them, then each row goes on alone. The keys of a page are stored transposed, [H, P],
// so that a vector of scores belongs to consecutive tokens and nothing is summed across lanes. The result of a query
// does not depend on its neighbours: blocks of keys start at multiples of kBlockTokens whatever the tile, and blocks
// that a query does not see leave its state bit-identical. This holds for finite inputs: a NaN reaches all queries that
// see it, may reach others of the tile, and never turns into a number.
//
// Elements of int8 and fp8 pools meet queries and weights without their scales: those of keys multiply the scores, those
// of values the weights.
//
// Keys and values of int4 pools become floats a block at a time, and stay in a core's first-level cache while the
// queries of a tile pass. They are stored rotated: queries are rotated too, and outputs back.
//
// With matrix tiles (AMX), queries of bfloat16 meet a pool of bfloat16 as such, and so do weights. Keys and values of a
// block are arranged as tiles once for all queries of a tile; values that a tile does not see become zeros.
//
// Latents are stored by token, [P, H], since their beginnings are the values. The keys of a block are transposed into
// working memory, once for all queries of a tile.

#pragma once

#include <algorithm>
#include <array>
#include <bitset>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __AMX_BF16__
#include "amx.h"
#endif
#include "int4.h"
#include "kernels.h"
#include "scaled.h"
#include "simd.h"

namespace NATIVE_ISA {

using native::AttentionProblem;
using native::Executor;
using native::parallel_for;
using native::PoolFormat;

constexpr int64_t kBlockTokens = 64;
constexpr int64_t kTreeNodes = 32;    // bits of a word of a tree mask
#ifdef NATIVE_AMX
constexpr bool kUsesTiles = true;  // the kernels for tiles are the only ones of their instruction set
#else
constexpr bool kUsesTiles = false;
#endif
constexpr int64_t kTileVectors = kUsesTiles ? 64 : 36;
constexpr int64_t kMinPageTokens = 4;  // width of the narrowest vectors in use
constexpr int64_t kTilesPerThread = 4;  // minimum when rows would be joined to share pages
constexpr int kGroup = 6;  // query vectors that the registers hold at once
constexpr int kChunk = NATIVE_WIDTH == 16 ? 4 : 2;  // vectors of keys or values beside each query vector
constexpr int64_t kFewGroups = 2;  // with more, computing takes longer than reading
constexpr int64_t kSerialWrites = 4 << 10;  // elements; below, waking a thread costs more than it saves
constexpr uint64_t kAllTokens = ~uint64_t{0};  // word of kBlockTokens bits
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Consecutive queries of one row.
struct Part {
  int64_t row, first_token, num_queries, first_position;
  int64_t tree_start;  // position from which the row's tokens are nodes; the row's end without trees
};

// Parts [first_part, end_part) of rows whose first `num_shared` tokens are on the same pages.
struct QueryTile {
  int64_t first_part, end_part, num_shared;
};

// Values of tokens on one page.
template <typename Number>
struct Span {
  const Number* values;
  int64_t first, num_tokens;  // counted from the block's start
};

// Up to kBlockTokens consecutive tokens of a row, for one KV head.
template <int W, typename Number, typename Key>
struct Block {
  const Key* columns[kBlockTokens / W];  // keys, W tokens each; surplus columns repeat the last one
  Span<Number> spans[kBlockTokens / kMinPageTokens + 1];
  int num_spans = 0;
  float key_scales[kBlockTokens], value_scales[kBlockTokens];  // of pools that have scales
};

// Memory from the begin of a line on.
template <typename Number>
struct LineAllocator {
  using value_type = Number;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <typename Other>
  explicit LineAllocator(const LineAllocator<Other>&) {}
  Number* allocate(size_t size) { return static_cast<Number*>(::operator new(size * sizeof(Number), kLine)); }
  void deallocate(Number* from, size_t) { ::operator delete(from, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};
template <typename Number>
using Lines = std::vector<Number, LineAllocator<Number>>;

// Working memory of one thread, reused from tile to tile.
struct Scratch {
  Lines<float> scores;
  Lines<BFloat16> tile_q, tile_weights, tile_keys, tile_values;  // as tiles take them
  std::vector<float> q, sums, max_scores, weights;
  std::vector<uint64_t> visible;  // a word per vector with a bit for each token of a block, set if the vector sees it
  std::vector<float> largest;     // [vectors, W], the largest scores of a block by lane
  std::vector<float> factors;     // by which a block multiplies each vector's sums
  std::vector<float> head;          // of a token, which is narrow in memory
  std::vector<BFloat16> zeros;      // values that no query sees
  std::vector<float> keys, values;  // [H, kBlockTokens] and [kBlockTokens, H]: a block of a narrow pool, keys of latents
  void resize(int64_t num_vectors, int64_t head_dim, int64_t width) {
    head.resize(head_dim);
    q.resize(num_vectors * head_dim);
    sums.resize(num_vectors * head_dim);
    scores.resize(num_vectors * kBlockTokens);
    if constexpr (kUsesTiles) {
      tile_q.resize(num_vectors * head_dim);
      tile_weights.resize(num_vectors * kBlockTokens);
      tile_keys.resize(head_dim * kBlockTokens);
      tile_values.resize(head_dim * kBlockTokens);
      zeros.resize(head_dim);
    }
    max_scores.resize(num_vectors + width);
    weights.resize(num_vectors * width);
    visible.resize(num_vectors);
    largest.resize((num_vectors + width) * width);
    factors.resize(num_vectors + width);
  }
};

// Memory that is fetched while a block is scored: columns of the next block, and `distance` elements after the keys of
// this one its values.
template <typename Number>
struct Ahead {
  const Number* const* columns;
  int64_t distance;
};

// Compute scores of `Vectors` queries with `Columns` columns of W tokens each: to[vector][column].
template <int W, typename Number, int Vectors, int Columns, bool Fetches>
void score(const float* q, const Number* const* columns, Ahead<Number> ahead, int64_t page_size, int64_t head_dim,
           float* to) {
  F<W> sums[Vectors][Columns];
  unrolled_pairs<Vectors, Columns>([&](int v, int c) NATIVE_INLINE { sums[v][c] = F<W>{}; });
  for (int64_t h = 0; h < head_dim; ++h) {
    F<W> k[Columns];
    unrolled<Columns>([&](int c) NATIVE_INLINE {
      k[c] = load<W>(columns[c] + h * page_size);
      if constexpr (Fetches) {
        __builtin_prefetch(columns[c] + h * page_size + ahead.distance);
        __builtin_prefetch(ahead.columns[c] + h * page_size);
      }
    });
    unrolled_pairs<Vectors, Columns>([&](int v, int c) NATIVE_INLINE {
      sums[v][c] = fma<W>(all<W>(q[v * head_dim + h]), k[c], sums[v][c]);
    });
  }
  unrolled_pairs<Vectors, Columns>([&](int v, int c) NATIVE_INLINE { store<W>(to + v * kBlockTokens + c * W, sums[v][c]); });
}

// Multiply `Chunks` vectors of the sums of `Vectors` queries by the queries' factors, and add the weighted values of some
// spans, from their element `first` on.
template <int W, typename Number, int Vectors, int Chunks>
void accumulate(const float* factors, const float* weights, const Span<Number>* spans, int num_spans, int64_t first,
                int64_t head_dim, float* sums) {
  F<W> sum[Vectors][Chunks];  // of the spans, so that no compiler merges the factors' multiplications with these
  unrolled_pairs<Vectors, Chunks>([&](int v, int c) NATIVE_INLINE { sum[v][c] = F<W>{}; });
  for (int i = 0; i < num_spans; ++i) {
    const float* weight = weights + spans[i].first;
    const Number* values = spans[i].values + first;
    for (int64_t t = 0; t < spans[i].num_tokens; ++t) {
      F<W> value[Chunks];
      unrolled<Chunks>([&](int c) NATIVE_INLINE { value[c] = load<W>(values + t * head_dim + c * W); });
      unrolled_pairs<Vectors, Chunks>([&](int v, int c) NATIVE_INLINE {
        sum[v][c] = fma<W>(all<W>(weight[v * kBlockTokens + t]), value[c], sum[v][c]);
      });
    }
  }
  unrolled_pairs<Vectors, Chunks>([&](int v, int c) NATIVE_INLINE {
    float* to = sums + v * head_dim + c * W;
    store<W>(to, fma<W>(load<W>(to), all<W>(factors[v]), sum[v][c]));
  });
}

// Functions indexed by log2 of the number of columns or chunks, up to kChunk, and by the number of vectors, from 1 to
// kGroup.
template <int W, typename Number>
struct ByVectors {
  using Score = void (*)(const float*, const Number* const*, Ahead<Number>, int64_t, int64_t, float*);
  using Accumulate = void (*)(const float*, const float*, const Span<Number>*, int, int64_t, int64_t, float*);
  template <int Columns, bool Fetches, int... V>
  static constexpr std::array<Score, kGroup> scores(std::integer_sequence<int, V...>) {
    return {score<W, Number, V + 1, Columns, Fetches>...};
  }
  template <int Chunks, int... V>
  static constexpr std::array<Accumulate, kGroup> accumulates(std::integer_sequence<int, V...>) {
    return {accumulate<W, Number, V + 1, Chunks>...};
  }
  static constexpr auto all = std::make_integer_sequence<int, kGroup>{};
  static constexpr std::array<Score, kGroup> fetching_score_of = scores<kChunk, true>(all);
  static constexpr std::array<std::array<Score, kGroup>, 3> score_of = {
      scores<1, false>(all), scores<2, false>(all), scores<kChunk, false>(all)};
  static constexpr std::array<std::array<Accumulate, kGroup>, 3> accumulate_of = {
      accumulates<1>(all), accumulates<2>(all), accumulates<kChunk>(all)};
};

#ifdef NATIVE_AMX
// Write the scores of one or two tiles of queries [16, H] with some columns of keys, 16 tokens each, two at a time.
template <int Tiles>
void score_tiles(const BFloat16* q, const BFloat16* keys, int64_t num_columns, int64_t head_dim, float* scores) {
  for (int64_t c = 0; c < num_columns; c += 2) {
    each_constant<4>([](auto i) NATIVE_INLINE { zero_tile<i>(); });
    for (int64_t h = 0; h < head_dim; h += kTileColumns) {
      each_constant<2>([&](auto i) NATIVE_INLINE {
        load_tile<6 + i>(keys + ((c + i) * head_dim + h) * kTileRows, kRowBytes);
      });
      each_constant<Tiles>([&](auto t) NATIVE_INLINE {
        load_tile<4 + t>(q + t * kTileRows * head_dim + h, head_dim * int64_t{sizeof(BFloat16)});
        each_constant<2>([&](auto i) NATIVE_INLINE { multiply_tiles<2 * t + i, 4 + t, 6 + i>(); });
      });
    }
    each_sums<Tiles, 2>([&](auto index, int t, int i) NATIVE_INLINE {
      store_tile<index>(scores + t * kTileRows * kBlockTokens + (c + i) * kTileRows, kBlockTokens * sizeof(float));
    });
  }
}

// Multiply the sums of up to one or two tiles of queries by the queries' factors, and add the weighted values of a block,
// 32 tokens at a time.
template <int Tiles>
void accumulate_tiles(const float* factors, const BFloat16* weights, const BFloat16* values, int64_t num_chunks,
                      int64_t num_vectors, int64_t head_dim, float* sums) {
  constexpr int64_t kSpan = 2 * kTileRows;  // elements of values at once
  alignas(kLineBytes) float found[Tiles * kTileRows * kSpan];
  for (int64_t h = 0; h < head_dim; h += kSpan) {
    each_constant<4>([](auto i) NATIVE_INLINE { zero_tile<i>(); });
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      each_constant<2>([&](auto i) NATIVE_INLINE {
        load_tile<6 + i>(values + (h + i * kTileRows) * kBlockTokens + chunk * kTileNumbers, kRowBytes);
      });
      each_constant<Tiles>([&](auto t) NATIVE_INLINE {
        load_tile<4 + t>(weights + t * kTileRows * kBlockTokens + chunk * kTileColumns, kBlockTokens * sizeof(BFloat16));
        each_constant<2>([&](auto i) NATIVE_INLINE { multiply_tiles<2 * t + i, 4 + t, 6 + i>(); });
      });
    }
    each_sums<Tiles, 2>([&](auto index, int t, int i) NATIVE_INLINE {
      store_tile<index>(found + t * kTileRows * kSpan + i * kTileRows, kSpan * sizeof(float));
    });
    for (int64_t v = 0; v < num_vectors; ++v) {
      for (int64_t i = 0; i < kSpan; i += 16) {
        float* to = sums + v * head_dim + h + i;
        store<16>(to, fma<16>(load<16>(to), all<16>(factors[v]), load<16>(found + v * kSpan + i)));
      }
    }
  }
}

// Call use(tiles, vector, num_vectors) for two tiles of queries at a time; `tiles` is a constant, how many there are.
template <typename Use>
inline void each_tiles(int64_t vector, int64_t num_vectors, TileShapes& shapes, const Use& use) {
  for (const int64_t end = vector + num_vectors; vector < end; vector += 2 * kTileRows) {
    const int64_t first = std::min(end - vector, kTileRows), second = std::min(end - vector - first, kTileRows);
    const int64_t other = second > 0 ? second : kTileRows;
    shapes.set({first, first, other, other, first, other, kTileRows, kTileRows});
    if (second > 0) {
      use(std::integral_constant<int, 2>{}, vector, first + second);
    } else {
      use(std::integral_constant<int, 1>{}, vector, first);
    }
  }
}
#endif

template <int W, typename Number, bool kLatents>
class Attention {
  static constexpr bool kIsInt4 = std::is_same_v<Number, Nibbles>;
  // Without instructions that widen bytes, those of a block are converted once for all queries of a tile.
  static constexpr bool kConverts = kIsInt4 || (kHasScales<Number> && W == 4);
  using Element = std::conditional_t<kConverts, float, Number>;  // of values as they meet weights
  using Key = std::conditional_t<kLatents, float, Element>;    // of keys as they meet queries
  static constexpr bool kInPlace = !kLatents && !kConverts;    // whether keys and values are read from the pool
  using Columns = std::array<const Key*, kBlockTokens / W>;

 public:
  explicit Attention(const AttentionProblem& p)
      : p_(p),
        group_(kLatents ? largest_share(p.num_query_heads) : p.num_query_heads / p.num_kv_heads),
        num_groups_(p.num_query_heads / group_),
        num_heads_(p.num_query_heads + (kLatents ? 1 : 2 * p.num_kv_heads)),
        stored_size_(native::stored_size(p.format, p.head_dim)),
        page_elements_(p.page_size * stored_size_),
        key_stride_(kLatents || kConverts ? kBlockTokens : p.page_size) {
    const int64_t pages_per_id = kLatents ? 1 : 2 * p.num_kv_heads;
    layer_ = static_cast<Number*>(p.pool) + p.layer * p.num_pages * pages_per_id * page_elements_;
    if constexpr (kHasScales<Number>) {
      layer_scales_ = static_cast<BFloat16*>(p.scales) + p.layer * p.num_pages * pages_per_id * p.page_size;
    }
  }

  void run(Executor& executor) {
    write(executor);
    find_parts();
    join_parts(executor.num_threads());
    const int64_t K = num_groups_;
    parallel_for(executor, static_cast<int64_t>(tiles_.size()) * K,
                 [&](int64_t task) { attend(tiles_[task / K], task % K); });
    const int64_t token_outputs = p_.num_query_heads * p_.value_dim;
    fill_with_zeros(p_.out, end_token_ * token_outputs, (p_.num_tokens - end_token_) * token_outputs);
  }

 private:
  // Return the number of query heads of a tile, which divides all: those of a latent are shared by several tiles.
  static int64_t largest_share(int64_t num_heads) {
    int64_t share = std::min(num_heads, kTileVectors);
    while (num_heads % share != 0) --share;
    return share;
  }

  Number* latents(int64_t page) const { return layer_ + page * page_elements_; }
  Number* keys(int64_t page, int64_t kv_head) const {
    return layer_ + (page * p_.num_kv_heads + kv_head) * 2 * page_elements_;
  }
  Number* values(int64_t page, int64_t kv_head) const { return keys(page, kv_head) + page_elements_; }
  // Return the scales of a page's keys, which those of its values follow; of latents, which are both.
  BFloat16* scales(int64_t page, int64_t kv_head) const {
    return layer_scales_ + (kLatents ? page : (page * p_.num_kv_heads + kv_head) * 2) * p_.page_size;
  }

  const int32_t* pages_of(int64_t row) const {
    return p_.page_table + (p_.table_row ? p_.table_row[row] : row) * p_.table_width;
  }
  // Return the page of a position; that of the last column for a position past it.
  int64_t page_of(int64_t row, int64_t position) const {
    return pages_of(row)[std::min(position / p_.page_size, p_.table_width - 1)];
  }

  // Write all new keys and values, before any row reads them.
  void write(Executor& executor) const {
    const int64_t num_elements = p_.num_tokens * p_.num_kv_heads * p_.head_dim;
    const int64_t num_tasks = num_elements < kSerialWrites ? 1 : 2 * executor.num_threads();
    parallel_for(executor, num_tasks, [&](int64_t task) {
      for (int64_t row = 0; row < p_.num_rows; ++row) write_row(row, task, num_tasks);
    });
  }

  // Write the share of one of several tasks in a row's tokens.
  void write_row(int64_t row, int64_t task, int64_t num_tasks) const {
    static thread_local std::vector<float> rotated, buffer;
    rotated.resize(p_.head_dim);
    buffer.resize(p_.head_dim);
    const int64_t first = p_.cu_q_lens[row], shift = p_.kv_lens[row] - p_.cu_q_lens[row + 1];
    // Tokens past the last column have no pages.
    const int64_t end = std::min<int64_t>(p_.cu_q_lens[row + 1], p_.table_width * p_.page_size - shift);
    for (int64_t token = first + (num_tasks + task - first % num_tasks) % num_tasks; token < end; token += num_tasks) {
      const int64_t page = page_of(row, token + shift), slot = (token + shift) % p_.page_size;
      if constexpr (kLatents) {
        rotate(new_head(token, p_.num_query_heads, buffer.data()), token, rotated.data());
        const BFloat16 scale = store_vector(rotated.data(), latents(page) + slot * p_.head_dim, 1);
        if constexpr (kHasScales<Number>) scales(page, 0)[slot] = scale;
        continue;
      }
      for (int64_t head = 0; head < p_.num_kv_heads; ++head) {
        Number* key = keys(page, head) + slot;
        Number* value = values(page, head) + slot * stored_size_;
        rotate(new_head(token, p_.num_query_heads + head, buffer.data()), token, rotated.data());
        const BFloat16 key_scale = store_vector(rotated.data(), key, p_.page_size);
        const float* v = new_head(token, p_.num_query_heads + p_.num_kv_heads + head, buffer.data());
        std::copy_n(v, p_.head_dim, rotated.data());
        const BFloat16 value_scale = store_vector(rotated.data(), value, 1);
        if constexpr (kHasScales<Number>) {
          BFloat16* to = scales(page, head) + slot;
          to[0] = key_scale;
          to[p_.page_size] = value_scale;
        }
      }
    }
  }

  // Write a vector, which may change, to elements that are `stride` apart; return its scale if the pool has scales.
  BFloat16 store_vector(float* x, Number* to, int64_t stride) const {
    if constexpr (kHasScales<Number>) {
      return quantize(x, p_.head_dim, to, stride);
    } else if constexpr (kIsInt4) {
      hadamard(x, p_.head_dim);
      pack_int4(x, p_.head_dim, to, stride);
    } else {
      for (int64_t h = 0; h < p_.head_dim; ++h) store_one(to + h * stride, x[h]);
    }
    return {};
  }

  // Return one head of a token, counted over q, then k, then v, or over q, then the latent; in `buffer` if it is narrow.
  const float* new_head(int64_t token, int64_t head, float* buffer) const {
    const native::Activations stored = p_.qkv.from((token * num_heads_ + head) * p_.head_dim);
    if (!stored.is_bfloat16) return static_cast<const float*>(stored.data);
    for (int64_t h = 0; h < p_.head_dim; h += W) store<W>(buffer + h, load_some<W>(stored, h, W));
    return buffer;
  }

  // Rotate the two halves of a token's query or key, of latents those behind the value, by the token's angles.
  void rotate(const float* x, int64_t token, float* __restrict to) const {
    if (!p_.rope) {
      std::copy_n(x, p_.head_dim, to);
      return;
    }
    if constexpr (kLatents) {
      std::copy_n(x, p_.value_dim, to);
      x += p_.value_dim;
      to += p_.value_dim;
    }
    const int64_t half = (kLatents ? p_.head_dim - p_.value_dim : p_.head_dim) / 2;
    const float *cos = p_.rope + token * half, *sin = cos + p_.num_tokens * half;
    for (int64_t h = 0; h < half; ++h) to[h] = x[h] * cos[h] - x[half + h] * sin[h];
    for (int64_t h = 0; h < half; ++h) to[half + h] = x[half + h] * cos[h] + x[h] * sin[h];
  }

  void find_parts() {
    const int64_t part_queries = std::max<int64_t>(1, kTileVectors / group_);
    for (int64_t row = 0; row < p_.num_rows; ++row) {
      const int64_t end = p_.cu_q_lens[row + 1];
      const int64_t first = p_.max_queries < 0 ? std::max<int64_t>(end - 1, p_.cu_q_lens[row]) : p_.cu_q_lens[row];
      if (p_.max_queries > 0 && end - first > p_.max_queries) continue;
      const int64_t tree_start = p_.kv_lens[row] - (p_.tree_mask ? std::min(kTreeNodes, end - first) : 0);
      for (int64_t token = first; token < end; token += part_queries) {
        const int64_t num_queries = std::min(part_queries, end - token);
        parts_.push_back({row, token, num_queries, token + p_.kv_lens[row] - end, tree_start});
      }
    }
    end_token_ = p_.num_rows > 0 ? p_.cu_q_lens[p_.num_rows] : 0;
  }

  // Return the number of pages that all queries of a part see in full.
  int64_t num_full_pages(const Part& part) const {
    return std::min(std::min(part.first_position + 1, part.tree_start) / p_.page_size, p_.table_width);
  }

  // Make tiles of parts: neighbours in the order of their pages are joined while they share a block and fit.
  void join_parts(int64_t num_threads) {
    const int64_t num_parts = static_cast<int64_t>(parts_.size());
    const int64_t most_joined = num_parts * num_groups_ / (kTilesPerThread * num_threads);
    const bool joins = p_.window == 0 && most_joined > 1 && !p_.sees_all;
    if (joins) {
      std::stable_sort(parts_.begin(), parts_.end(), [&](const Part& a, const Part& b) {
        const int32_t *of_a = pages_of(a.row), *of_b = pages_of(b.row);
        return std::lexicographical_compare(of_a, of_a + num_full_pages(a), of_b, of_b + num_full_pages(b));
      });
    }
    for (int64_t first = 0, end; first < num_parts; first = end) {
      int64_t num_vectors = parts_[first].num_queries * group_, num_shared = 0;
      for (end = first + 1; joins && end < num_parts && end - first < most_joined; ++end) {
        num_vectors += parts_[end].num_queries * group_;
        const int64_t shared = num_tokens_shared(parts_[first], parts_[end]);
        if (num_vectors > kTileVectors || shared == 0) break;
        num_shared = shared;  // with the first part, hence with all between: parts are in the order of pages
      }
      tiles_.push_back({first, end, num_shared});
    }
  }

  // Return the number of tokens in whole blocks that both parts see in full, on the same pages.
  int64_t num_tokens_shared(const Part& a, const Part& b) const {
    const int32_t *of_a = pages_of(a.row), *of_b = pages_of(b.row);
    const int64_t most = std::min(num_full_pages(a), num_full_pages(b));
    const int64_t num_pages = std::mismatch(of_a, of_a + most, of_b).first - of_a;
    return num_pages * p_.page_size / kBlockTokens * kBlockTokens;
  }

  void attend(const QueryTile& tile, int64_t kv_head) const {
    static thread_local Scratch scratch;
    attend_in(tile, kv_head, scratch);
  }

  // Not inlined: the address of thread-local memory is looked up again at each use.
  [[gnu::noinline]] void attend_in(const QueryTile& tile, int64_t kv_head, Scratch& scratch) const {
    int64_t num_vectors = 0;
    for (int64_t i = tile.first_part; i < tile.end_part; ++i) num_vectors += parts_[i].num_queries * group_;
    scratch.resize(num_vectors, p_.head_dim, W);
    if constexpr (kConverts) {
      scratch.keys.resize(kBlockTokens * p_.head_dim);
      scratch.values.resize(kBlockTokens * p_.head_dim);
    }
    int64_t vector = 0;
    for (int64_t i = tile.first_part; i < tile.end_part; ++i) {
      start(parts_[i], kv_head, vector, scratch);
      vector += parts_[i].num_queries * group_;
    }
    for (int64_t block = 0; block < tile.num_shared; block += kBlockTokens) {
      const auto keys = find_block(parts_[tile.first_part].row, kv_head, block, block, block + kBlockTokens, scratch);
      const auto next = next_columns(parts_[tile.first_part].row, kv_head, block + kBlockTokens, tile.num_shared);
      std::fill_n(scratch.visible.begin(), num_vectors, kAllTokens);
      score_block(keys, kBlockTokens, next, 0, num_vectors, scratch);
      absorb(keys, kBlockTokens, 0, num_vectors, scratch);
      add_values(keys, kBlockTokens, 0, num_vectors, scratch);
    }
    vector = 0;
    for (int64_t i = tile.first_part; i < tile.end_part; ++i) {
      attend_alone(parts_[i], kv_head, tile.num_shared, vector, scratch);
      finish(parts_[i], kv_head, vector, scratch);
      vector += parts_[i].num_queries * group_;
    }
  }

  // Attend with the queries of one part, whose vectors begin at `vector`, over its row's tokens from `done` on.
  void attend_alone(const Part& part, int64_t kv_head, int64_t done, int64_t vector, Scratch& s) const {
    const int64_t num_vectors = part.num_queries * group_;
    const int64_t end = p_.sees_all ? p_.kv_lens[part.row] : part.first_position + part.num_queries;
    const int64_t first = first_key(std::min(part.first_position, part.tree_start));
    for (int64_t start = std::max(done, first / kBlockTokens * kBlockTokens); start < end; start += kBlockTokens) {
      const int64_t stop = std::min(end, start + kBlockTokens);
      const auto block = find_block(part.row, kv_head, start, std::max(start, first), stop, s);
      const auto next = next_columns(part.row, kv_head, start + kBlockTokens, end);
      for (int64_t query = 0; query < part.num_queries; ++query) {
        std::fill_n(s.visible.begin() + vector + query * group_, group_, visible_tokens(part, query, start));
      }
      score_block(block, stop - start, next, vector, num_vectors, s);
      absorb(block, stop - start, vector, num_vectors, s);
      add_values(block, stop - start, vector, num_vectors, s);
    }
  }

  int64_t first_key(int64_t position) const {
    return p_.window > 0 ? std::max<int64_t>(0, position - p_.window + 1) : 0;
  }

  // Return a word with a bit for each token of the block at `start`, set if the query of a part sees the token.
  uint64_t visible_tokens(const Part& part, int64_t query, int64_t start) const {
    if (p_.sees_all) return tokens_before(p_.kv_lens[part.row] - start);
    const int64_t position = part.first_position + query, node = position - part.tree_start;
    if (node < 0) return tokens_before(position + 1 - start) & ~tokens_before(first_key(position) - start);
    const uint64_t own = uint64_t{1} << node;
    uint64_t nodes = (static_cast<uint32_t>(p_.tree_mask[part.first_token + query]) & (own - 1)) | own;
    const int64_t num_nodes = std::bitset<kTreeNodes>(nodes).count();
    const int64_t first = first_key(part.tree_start + num_nodes - 1), shift = part.tree_start - start;
    for (int64_t seen = num_nodes; p_.window > 0 && seen > p_.window; --seen) nodes &= nodes - 1;  // drop the oldest
    nodes = shift >= kBlockTokens || shift <= -kTreeNodes ? 0 : shift >= 0 ? nodes << shift : nodes >> -shift;
    return nodes | (tokens_before(shift) & ~tokens_before(first - start));
  }

  static uint64_t tokens_before(int64_t end) {
    return end <= 0 ? 0 : end >= kBlockTokens ? kAllTokens : (uint64_t{1} << end) - 1;
  }

  // Return the keys of the tokens [start, end) and the values of [first, end): stale ones outside might be NaN.
  Block<W, Element, Key> find_block(int64_t row, int64_t kv_head, int64_t start, int64_t first, int64_t end,
                                    Scratch& s) const {
    Block<W, Element, Key> block;
    int column = 0;
    if constexpr (kLatents) s.keys.resize(p_.head_dim * kBlockTokens);
    for (int64_t position = start, next; position < end; position = next) {
      const int64_t slot = position % p_.page_size, page = page_of(row, position);
      next = std::min(end, position - slot + p_.page_size);
      const Number* stored_keys = kLatents ? latents(page) : keys(page, kv_head);
      for (int64_t t = slot; t < slot + next - position; t += W, ++column) {
        block.columns[column] = find_keys(stored_keys + (kLatents ? t * p_.head_dim : t), column * W, s);
        if constexpr (kHasScales<Number>) {
          const BFloat16* of_keys = scales(page, kv_head) + t;
          store<W>(block.key_scales + column * W, load<W>(of_keys) * kLoadedUnit<Number>);
          const BFloat16* of_values = of_keys + (kLatents ? 0 : p_.page_size);
          store<W>(block.value_scales + column * W, load<W>(of_values) * kLoadedUnit<Number>);
        }
      }
      if (const int64_t from = std::max(position, first); from < next) {
        const Number* stored = (kLatents ? latents(page) : values(page, kv_head)) + (slot + from - position) * stored_size_;
        block.spans[block.num_spans++] = {find_values(stored, from - start, next - from, s), from - start, next - from};
      }
    }
    for (; column < kBlockTokens / W; ++column) block.columns[column] = block.columns[column - 1];
    return block;
  }

  // Return the columns of the keys of the block at `start`, the last token's from `end` on, if keys are read in place.
  Columns next_columns(int64_t row, int64_t kv_head, int64_t start, int64_t end) const {
    Columns columns = {};
    if constexpr (kInPlace) {
      for (int i = 0; i < kBlockTokens / W; ++i) {
        const int64_t position = std::min(start + i * W, end - 1);
        columns[i] = keys(page_of(row, position), kv_head) + position % p_.page_size;
      }
    }
    return columns;
  }

  // Return the keys of W tokens of a page, the first of them `at` tokens after the block's start.
  const Key* find_keys(const Number* stored, int64_t at, Scratch& s) const {
    if constexpr (kLatents) {
      return transpose(stored, s.keys.data() + at);
    } else if constexpr (kIsInt4) {
      float* to = s.keys.data() + at;
      unpack_keys<W>(stored, p_.page_size, p_.head_dim, to, kBlockTokens);
      return to;
    } else if constexpr (kConverts) {
      float* to = s.keys.data() + at;
      for (int64_t h = 0; h < p_.head_dim; ++h) store<W>(to + h * kBlockTokens, load<W>(stored + h * p_.page_size));
      return to;
    } else {
      return stored;
    }
  }

  // Return the values of some tokens of a page, the first of them `at` tokens after the block's start.
  const Element* find_values(const Number* stored, int64_t at, int64_t num_tokens, Scratch& s) const {
    if constexpr (kIsInt4) {
      float* to = s.values.data() + at * p_.head_dim;
      for (int64_t t = 0; t < num_tokens; ++t) {
        unpack_value<W>(stored + t * stored_size_, p_.head_dim, to + t * p_.head_dim);
      }
      return to;
    } else if constexpr (kConverts) {
      float* to = s.values.data() + at * p_.head_dim;
      for (int64_t i = 0; i < num_tokens * p_.head_dim; i += W) store<W>(to + i, load<W>(stored + i));
      return to;
    } else {
      return stored;
    }
  }

  // Write W consecutive latents as columns; return `to`.
  const float* transpose(const Number* from, float* to) const {
    const int64_t H = p_.head_dim;
    for (int64_t h = 0; h < H; h += W) {
      F<W> rows[W];
      for (int t = 0; t < W; ++t) rows[t] = load<W>(from + t * H + h);
      for (int i = 0; i < W; ++i) {
        F<W> column;
        for (int t = 0; t < W; ++t) column[t] = rows[t][i];
        store<W>(to + (h + i) * kBlockTokens, column);
      }
    }
    return to;
  }

  // Return the token and the query head of one vector of a part.
  std::pair<int64_t, int64_t> token_and_head(const Part& part, int64_t kv_head, int64_t vector) const {
    return {part.first_token + vector / group_, kv_head * group_ + vector % group_};
  }

  void start(const Part& part, int64_t kv_head, int64_t vector, Scratch& s) const {
    for (int64_t i = 0; i < part.num_queries * group_; ++i) {
      const auto [token, head] = token_and_head(part, kv_head, i);
      const int64_t v = vector + i;
      float* q = &s.q[v * p_.head_dim];
      rotate(new_head(token, head, s.head.data()), token, q);
      if constexpr (kIsInt4) hadamard(q, p_.head_dim);
      if constexpr (kUsesTiles) {
        for (int64_t h = 0; h < p_.head_dim; h += W) store<W>(&s.tile_q[v * p_.head_dim + h], load<W>(q + h));
      } else {
        for (int64_t h = 0; h < p_.head_dim; ++h) q[h] *= p_.scale * kLog2E * hadamard_factor();
      }
      std::fill_n(&s.sums[v * p_.head_dim], p_.head_dim, 0.0f);
      std::fill_n(&s.weights[v * W], W, 0.0f);
      s.max_scores[v] = p_.sinks ? p_.sinks[head] * kLog2E : kMinusInfinity;
      s.weights[v * W] = p_.sinks ? 1.0f : 0.0f;
    }
  }

  // Return the first vector and the size of a group, of some of nearly equal size.
  static std::pair<int64_t, int64_t> group_of(int64_t vector, int64_t num_vectors, int64_t index, int64_t num_groups) {
    const int64_t first = index * num_vectors / num_groups, end = (index + 1) * num_vectors / num_groups;
    return {vector + first, end - first};
  }

  // Score `num_vectors` vectors with the first `num_tokens` of a block, in units of log2(e); the scores after those are
  // garbage. `next` are the columns to fetch meanwhile, if keys are read in place.
  void score_block(const Block<W, Element, Key>& block, int64_t num_tokens, const Columns& next, int64_t vector,
                   int64_t num_vectors, Scratch& s) const {
#ifdef NATIVE_AMX
    arrange(block, num_tokens, s);
    TileShapes shapes;
    each_tiles(vector, num_vectors, shapes, [&](auto tiles, int64_t v, int64_t) {
      const int64_t num_columns = num_chunks(num_tokens) * 2;
      score_tiles<tiles>(&s.tile_q[v * p_.head_dim], s.tile_keys.data(), num_columns, p_.head_dim, &s.scores[v * kBlockTokens]);
    });
#else
    const int64_t num_groups = (num_vectors + kGroup - 1) / kGroup, num_columns = columns_of(num_tokens);
    const bool is_few = kInPlace && num_groups <= kFewGroups;
    for (int64_t c = 0, columns; c < num_columns; c += columns) {
      columns = is_few ? kChunk : chunks_at_once(num_columns - c);
      for (int64_t i = 0; i < num_groups; ++i) {
        const auto [v, size] = group_of(vector, num_vectors, i, num_groups);
        const bool fetches = is_few && i == 0;
        const auto& by_vectors = fetches ? ByVectors<W, Key>::fetching_score_of : ByVectors<W, Key>::score_of[columns / 2];
        const Ahead<Key> ahead{next.data() + c, page_elements_};
        by_vectors[size - 1](&s.q[v * p_.head_dim], block.columns + c, ahead, key_stride_, p_.head_dim,
                             &s.scores[v * kBlockTokens + c * W]);
      }
    }
#endif
  }

#ifdef NATIVE_AMX
  // Return the number of chunks of 32 tokens that a tile has in a row.
  static int64_t num_chunks(int64_t num_tokens) { return (num_tokens + kTileColumns - 1) / kTileColumns; }

  // Arrange keys, [columns, H / 2, 16 tokens, 2], and values, [H / 16, pairs of tokens, 16, 2], of a block's first tokens.
  void arrange(const Block<W, Element, Key>& block, int64_t num_tokens, Scratch& s) const {
    const int64_t H = p_.head_dim, end = num_chunks(num_tokens) * kTileColumns;
    BFloat16* to = s.tile_keys.data();
    for (int64_t c = 0; c < end / W; ++c) {
      for (int64_t h = 0; h < H; h += 2, to += kTileColumns) {
        interleave(block.columns[c] + h * key_stride_, block.columns[c] + (h + 1) * key_stride_, to);
      }
    }
    std::array<const BFloat16*, kBlockTokens> values;
    values.fill(s.zeros.data());
    for (int i = 0; i < block.num_spans; ++i) {
      const auto& span = block.spans[i];
      for (int64_t t = 0; t < span.num_tokens; ++t) values[span.first + t] = span.values + t * H;
    }
    for (int64_t t = 0; t < end; t += 2) {
      for (int64_t h = 0; h < H; h += kTileRows) {
        interleave(values[t] + h, values[t + 1] + h, &s.tile_values[h * kBlockTokens + t * kTileRows]);
      }
    }
  }
#endif

  static int64_t columns_of(int64_t num_tokens) { return (num_tokens + W - 1) / W; }

  // Return the number of columns or chunks for one call.
  static int64_t chunks_at_once(int64_t num_left) { return num_left >= kChunk ? kChunk : num_left >= 2 ? 2 : 1; }

  // Turn the scores of a block's first `num_tokens` into weights, and add them to each vector's softmax. Tokens that a
  // vector does not see change no bit: their weights are 0, and the factor of its sums is 1 if it sees none.
  void absorb(const Block<W, Element, Key>& block, int64_t num_tokens, int64_t vector, int64_t num_vectors,
              Scratch& s) const {
    const int64_t num_columns = columns_of(num_tokens);
    for (int64_t v = vector; v < vector + num_vectors; ++v) {
      store<W>(&s.largest[v * W], finish_scores(block, num_columns, v, s));
    }
    for (int64_t v = 0; v < num_vectors; v += W) update_maxima(vector + v, num_vectors - v, s);
    for (int64_t v = vector; v < vector + num_vectors; ++v) {
      float* scores = &s.scores[v * kBlockTokens];
      if (s.visible[v] == 0) {
        std::fill_n(scores, num_columns * W, 0.0f);
        if constexpr (kUsesTiles) std::fill_n(&s.tile_weights[v * kBlockTokens], kBlockTokens, BFloat16{});
        continue;
      }
      const F<W> total = weigh(block, num_columns, s.max_scores[v], scores);
      store<W>(&s.weights[v * W], fma<W>(load<W>(&s.weights[v * W]), all<W>(s.factors[v]), total));
      if constexpr (kUsesTiles) {
        BFloat16* to = &s.tile_weights[v * kBlockTokens];
        for (int64_t c = 0; c < num_columns; ++c) store<W>(to + c * W, load<W>(scores + c * W));
        if (num_columns % 2 == 1) std::fill_n(to + num_columns * W, W, BFloat16{});
      }
    }
  }

  // Turn a vector's scores into weights, and return their sum by lane. Not inlined: the sum would be kept in memory.
  [[gnu::noinline]] static F<W> weigh(const Block<W, Element, Key>& block, int64_t num_columns, float max_score,
                                      float* scores) {
    F<W> total = {};
    const auto weigh_one = [&](int64_t c) NATIVE_INLINE {
      F<W> weight = exp2_of_negative<W>(load<W>(scores + c * W) - max_score);
      total += weight;
      if constexpr (kHasScales<Number>) weight *= load<W>(block.value_scales + c * W);
      store<W>(scores + c * W, weight);
    };
    if (num_columns == kBlockTokens / W) {
      unrolled<kBlockTokens / W>(weigh_one);
    } else {
      for (int64_t c = 0; c < num_columns; ++c) weigh_one(c);
    }
    return total;
  }

  // Finish a vector's scores of a block: multiply them by the keys' scales, cap them, and hide those that it does not
  // see. Return the largest of each lane.
  F<W> finish_scores(const Block<W, Element, Key>& block, int64_t num_columns, int64_t vector, Scratch& s) const {
    const uint64_t visible = s.visible[vector];
    float* scores = &s.scores[vector * kBlockTokens];
    if (!kHasScales<Number> && !kUsesTiles && p_.soft_cap == 0 && visible == kAllTokens) {
      F<W> largest = load<W>(scores);
      for (int c = 1; c < kBlockTokens / W; ++c) largest = max<W>(largest, load<W>(scores + c * W));
      return largest;
    }
    F<W> largest = all<W>(kMinusInfinity);
    for (int64_t c = 0; c < num_columns; ++c) {
      F<W> score = load<W>(scores + c * W);
      if constexpr (kUsesTiles) score *= p_.scale * kLog2E;
      if constexpr (kHasScales<Number>) score *= load<W>(block.key_scales + c * W);
      if (p_.soft_cap > 0) score = capped(score);
      const I<W> is_visible = (lane_bits() & static_cast<int32_t>(visible >> (c * W) & 0xffff)) != 0;
      score = is_visible ? score : all<W>(kMinusInfinity);
      store<W>(scores + c * W, score);
      largest = max<W>(largest, score);
    }
    return largest;
  }

  // Update the maxima of up to W vectors by a block's largest scores, and compute the factors of their sums.
  static void update_maxima(int64_t vector, int64_t num_vectors, Scratch& s) {
    F<W> rows[W];
    for (int i = 0; i < W; ++i) rows[i] = load<W>(&s.largest[(vector + i) * W]);
    const F<W> before = load<W>(&s.max_scores[vector]), found = max_of_each<W>(rows);
    const F<W> largest = lane_numbers<W>() < static_cast<int32_t>(num_vectors) ? found : all<W>(kMinusInfinity);
    store<W>(&s.max_scores[vector], largest > before ? largest : before);
    store<W>(&s.factors[vector], exp2_of_negative<W>(largest > before ? before - largest : F<W>{}));
  }

  static I<W> lane_bits() {
    I<W> bits;
    for (int i = 0; i < W; ++i) bits[i] = 1 << i;
    return bits;
  }

  F<W> capped(const F<W>& score) const {  // soft_cap * tanh(score / soft_cap), of scores in units of log2(e)
    const F<W> x = score / (p_.soft_cap * kLog2E);
    const F<W> decay = exp_of_negative<W>((x < 0 ? x : -x) * 2.0f);
    const F<W> tanh_of_abs = (1.0f - decay) / (1.0f + decay);
    return (x < 0 ? -tanh_of_abs : tanh_of_abs) * (p_.soft_cap * kLog2E);
  }

  // Add the weighted values of a block's tokens.
  void add_values(const Block<W, Element, Key>& block, int64_t num_tokens, int64_t vector, int64_t num_vectors, Scratch& s) const {
#ifdef NATIVE_AMX
    TileShapes shapes;
    each_tiles(vector, num_vectors, shapes, [&](auto tiles, int64_t v, int64_t size) {
      accumulate_tiles<tiles>(&s.factors[v], &s.tile_weights[v * kBlockTokens], s.tile_values.data(), num_chunks(num_tokens), size,
                              p_.head_dim, &s.sums[v * p_.head_dim]);
    });
#else
    const int64_t H = p_.head_dim, V = p_.value_dim, num_groups = (num_vectors + kGroup - 1) / kGroup;
    for (int64_t h = 0, chunks; h < V; h += chunks * W) {  // outside, so that values stay in the first-level cache
      chunks = chunks_at_once((V - h) / W);
      for (int64_t i = 0; i < num_groups; ++i) {
        const auto [v, size] = group_of(vector, num_vectors, i, num_groups);
        const auto accumulate = ByVectors<W, Element>::accumulate_of[chunks / 2][size - 1];
        accumulate(&s.factors[v], &s.scores[v * kBlockTokens], block.spans, block.num_spans, h, H, &s.sums[v * H + h]);
      }
    }
#endif
  }

  void finish(const Part& part, int64_t kv_head, int64_t vector, Scratch& s) const {
    for (int64_t i = 0; i < part.num_queries * group_; ++i) {
      const auto [token, head] = token_and_head(part, kv_head, i);
      const int64_t v = vector + i;
      const native::Activations to = p_.out.from((token * p_.num_query_heads + head) * p_.value_dim);
      float* out = to.is_bfloat16 ? s.head.data() : static_cast<float*>(to.data);
      const float factor = 1.0f / sum_lanes<W>(load<W>(&s.weights[v * W]));
      for (int64_t h = 0; h < p_.value_dim; ++h) out[h] = s.sums[v * p_.head_dim + h] * factor * hadamard_factor();
      if constexpr (kIsInt4) hadamard(out, p_.head_dim);
      if (!to.is_bfloat16) continue;
      for (int64_t h = 0; h < p_.value_dim; h += W) store_some<W>(to, h, load<W>(out + h), W);
    }
  }

  // Return what undoes the growth of a vector that is rotated twice.
  float hadamard_factor() const { return kIsInt4 ? 1.0f / hadamard_block(p_.head_dim) : 1.0f; }

  const AttentionProblem& p_;
  const int64_t group_;          // query heads of a tile: those of a KV head, or some of those of the latents
  const int64_t num_groups_;
  const int64_t num_heads_;      // of a token in `qkv`
  const int64_t stored_size_;    // elements of the pool that hold a vector
  const int64_t page_elements_;  // elements of the keys (or values) of one page and head
  const int64_t key_stride_;     // elements between those of a token's key
  Number* layer_;
  BFloat16* layer_scales_ = nullptr;
  std::vector<Part> parts_;
  std::vector<QueryTile> tiles_;
  int64_t end_token_ = 0;
};

#ifdef NATIVE_AMX
// Return whether tiles take a problem's queries and pool.
inline bool fits_tiles(const AttentionProblem& p) {
  return p.qkv.is_bfloat16 && p.format == PoolFormat::kBFloat16 && !p.has_latents && p.head_dim % kTileColumns == 0 &&
         p.page_size % kTileRows == 0;
}

inline void attention_by_tiles(Executor& executor, const AttentionProblem& p) {
  Attention<16, BFloat16, false>(p).run(executor);
}
#else
template <int W, bool kLatents>
void attention_of_width(Executor& executor, const AttentionProblem& p) {
  switch (p.format) {
    case PoolFormat::kFloat32: return Attention<W, float, kLatents>(p).run(executor);
    case PoolFormat::kBFloat16: return Attention<W, BFloat16, kLatents>(p).run(executor);
    case PoolFormat::kFloat8: return Attention<W, Float8, kLatents>(p).run(executor);
    case PoolFormat::kInt8:
      if constexpr (!kLatents) return Attention<W, int8_t, false>(p).run(executor);
      break;
    case PoolFormat::kInt4:
      if constexpr (!kLatents) return Attention<W, Nibbles, false>(p).run(executor);
  }
}

template <bool kLatents>
void attention_over(Executor& executor, const AttentionProblem& p) {
  const int64_t run = p.format == PoolFormat::kInt4 ? native::int4_group(p.head_dim) / 2 : p.head_dim;
  if (p.page_size % NATIVE_WIDTH == 0 && run % NATIVE_WIDTH == 0 && p.value_dim % NATIVE_WIDTH == 0) {
    attention_of_width<NATIVE_WIDTH, kLatents>(executor, p);
  } else {
    attention_of_width<4, kLatents>(executor, p);
  }
}

inline void attention(Executor& executor, const AttentionProblem& p) {
  if (p.has_latents) {
    attention_over<true>(executor, p);
  } else {
    attention_over<false>(executor, p);
  }
}
#endif

}  // namespace NATIVE_ISA
