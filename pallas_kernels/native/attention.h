// Ragged paged attention with an online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022).
//
// A tile is a few queries of one row with all query heads of one kv head: `num_vectors` query vectors over the same
// keys. Keys of a page lie transposed, [H, P], so that a vector of scores belongs to consecutive tokens and nothing is
// summed across lanes. What a query computes does not depend on its neighbours: blocks of keys start at multiples of
// kBlockTokens whatever the tile, and blocks a query does not see leave its state as it is, to the bit.

#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace NATIVE_ISA {

using native::AttentionProblem;
using native::Executor;
using native::parallel_for;

constexpr int64_t kBlockTokens = 64;
constexpr int64_t kTileVectors = 32;
constexpr int kGroup = 6;  // query vectors the registers hold at once
constexpr int kChunk = NATIVE_WIDTH == 16 ? 4 : 2;  // vectors of keys or values beside each of them
constexpr int64_t kSerialWrites = 16 << 10;               // numbers; below, waking a thread costs more than it saves
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Some queries of one row.
struct QueryTile {
  int64_t row, first_token, num_queries, first_position;
};

// What one thread computes with, reused from tile to tile.
struct Scratch {
  std::vector<float> q, scores, sums, max_scores, weights;
  void resize(int64_t num_vectors, int64_t head_dim) {
    q.resize(num_vectors * head_dim);
    sums.resize(num_vectors * head_dim);
    scores.resize(num_vectors * kBlockTokens);
    max_scores.resize(num_vectors);
    weights.resize(num_vectors);
  }
};

// Scores of `Vectors` queries with `Columns` columns of W tokens each: to[vector][column].
template <int W, typename Number, int Vectors, int Columns>
void score(const float* q, const Number* const* columns, int64_t page_size, int64_t head_dim, float* to) {
  F<W> sums[Vectors][Columns] = {};
  for (int64_t h = 0; h < head_dim; ++h) {
    F<W> k[Columns];
    for (int c = 0; c < Columns; ++c) k[c] = load<W>(columns[c] + h * page_size);
    for (int v = 0; v < Vectors; ++v) {
      for (int c = 0; c < Columns; ++c) sums[v][c] += q[v * head_dim + h] * k[c];
    }
  }
  for (int v = 0; v < Vectors; ++v) {
    for (int c = 0; c < Columns; ++c) store<W>(to + v * kBlockTokens + c * W, sums[v][c]);
  }
}

// Adds the values of some tokens, weighted, to `Chunks` vectors of the sums of `Vectors` queries.
template <int W, typename Number, int Vectors, int Chunks>
void accumulate(const float* weights, const Number* values, int64_t num_tokens, int64_t head_dim, float* sums) {
  F<W> sum[Vectors][Chunks];
  for (int v = 0; v < Vectors; ++v) {
    for (int c = 0; c < Chunks; ++c) sum[v][c] = load<W>(sums + v * head_dim + c * W);
  }
  for (int64_t t = 0; t < num_tokens; ++t) {
    F<W> value[Chunks];
    for (int c = 0; c < Chunks; ++c) value[c] = load<W>(values + t * head_dim + c * W);
    for (int v = 0; v < Vectors; ++v) {
      for (int c = 0; c < Chunks; ++c) sum[v][c] += weights[v * kBlockTokens + t] * value[c];
    }
  }
  for (int v = 0; v < Vectors; ++v) {
    for (int c = 0; c < Chunks; ++c) store<W>(sums + v * head_dim + c * W, sum[v][c]);
  }
}

// Functions by number of vectors, from 1 to kGroup.
template <int W, typename Number>
struct ByVectors {
  using Score = void (*)(const float*, const Number* const*, int64_t, int64_t, float*);
  using Accumulate = void (*)(const float*, const Number*, int64_t, int64_t, float*);
  template <int... V>
  static constexpr std::array<Score, kGroup> scores(std::integer_sequence<int, V...>) {
    return {score<W, Number, V + 1, kChunk>...};
  }
  template <int Chunks, int... V>
  static constexpr std::array<Accumulate, kGroup> accumulates(std::integer_sequence<int, V...>) {
    return {accumulate<W, Number, V + 1, Chunks>...};
  }
  static constexpr auto all = std::make_integer_sequence<int, kGroup>{};
  static constexpr std::array<Score, kGroup> score_of = scores(all);
  static constexpr std::array<Accumulate, kGroup> accumulate_wide = accumulates<kChunk>(all);
  static constexpr std::array<Accumulate, kGroup> accumulate_narrow = accumulates<1>(all);
};

template <int W, typename Number>
class Attention {
 public:
  explicit Attention(const AttentionProblem& p)
      : p_(p), group_(p.num_query_heads / p.num_kv_heads), page_numbers_(p.page_size * p.head_dim) {
    layer_ = static_cast<Number*>(p.pool) + p.layer * p.num_pages * 2 * p.num_kv_heads * page_numbers_;
  }

  void run(Executor& executor) {
    write(executor);
    find_tiles();
    const int64_t K = p_.num_kv_heads;
    parallel_for(executor, static_cast<int64_t>(tiles_.size()) * K,
                 [&](int64_t task) { attend(tiles_[task / K], task % K); });
    std::fill(p_.out + end_token_ * p_.num_query_heads * p_.head_dim,
              p_.out + p_.num_tokens * p_.num_query_heads * p_.head_dim, 0.0f);
  }

 private:
  Number* keys(int64_t page, int64_t kv_head) const {
    return layer_ + (page * p_.num_kv_heads + kv_head) * 2 * page_numbers_;
  }
  Number* values(int64_t page, int64_t kv_head) const { return keys(page, kv_head) + page_numbers_; }

  int64_t page_of(int64_t row, int64_t position) const {
    return p_.page_table[row * p_.table_width + position / p_.page_size];
  }

  // All new keys and values, before any row reads them.
  void write(Executor& executor) const {
    const int64_t numbers = p_.num_tokens * p_.num_kv_heads * p_.head_dim;
    const int64_t num_tasks = numbers < kSerialWrites ? 1 : 2 * executor.num_threads();
    parallel_for(executor, num_tasks, [&](int64_t task) {
      for (int64_t row = 0; row < p_.num_rows; ++row) write_row(row, task, num_tasks);
    });
  }

  // The row's share of one of several tasks: every so many tokens.
  void write_row(int64_t row, int64_t task, int64_t num_tasks) const {
    const int64_t first = p_.cu_q_lens[row], end = p_.cu_q_lens[row + 1], shift = p_.kv_lens[row] - end;
    for (int64_t token = first + (num_tasks + task - first % num_tasks) % num_tasks; token < end; token += num_tasks) {
      const int64_t page = page_of(row, token + shift), slot = (token + shift) % p_.page_size;
      for (int64_t head = 0; head < p_.num_kv_heads; ++head) {
        const float* k = p_.k + (token * p_.num_kv_heads + head) * p_.head_dim;
        const float* v = p_.v + (token * p_.num_kv_heads + head) * p_.head_dim;
        Number* key = keys(page, head) + slot;
        Number* value = values(page, head) + slot * p_.head_dim;
        for (int64_t h = 0; h < p_.head_dim; ++h) store_one(key + h * p_.page_size, k[h]);
        for (int64_t h = 0; h < p_.head_dim; ++h) store_one(value + h, v[h]);
      }
    }
  }



  void find_tiles() {
    const int64_t tile_queries = std::max<int64_t>(1, kTileVectors / group_);
    for (int64_t row = 0; row < p_.num_rows; ++row) {
      const int64_t end = p_.cu_q_lens[row + 1];
      for (int64_t token = p_.cu_q_lens[row]; token < end; token += tile_queries) {
        tiles_.push_back({row, token, std::min(tile_queries, end - token), token + p_.kv_lens[row] - end});
      }
    }
    end_token_ = p_.num_rows > 0 ? p_.cu_q_lens[p_.num_rows] : 0;
  }

  void attend(const QueryTile& tile, int64_t kv_head) const {
    static thread_local Scratch scratch;
    const int64_t num_vectors = tile.num_queries * group_;
    scratch.resize(num_vectors, p_.head_dim);
    start(tile, kv_head, scratch);
    const int64_t end = tile.first_position + tile.num_queries;
    const int64_t first = first_key(tile.first_position) / kBlockTokens * kBlockTokens;
    for (int64_t block = first; block < end; block += kBlockTokens) {
      score_block(tile, kv_head, block, std::min(end, block + kBlockTokens), scratch);
      for (int64_t v = 0; v < num_vectors; ++v) absorb(tile.first_position + v / group_, v, block, scratch);
      add_values(tile, kv_head, std::max(block, first_key(tile.first_position)), std::min(end, block + kBlockTokens),
                 block, scratch);
    }
    finish(tile, kv_head, scratch);
  }

  int64_t first_key(int64_t position) const {
    return p_.window > 0 ? std::max<int64_t>(0, position - p_.window + 1) : 0;
  }

  // Offset in q and out of one query vector of a tile.
  int64_t offset(const QueryTile& tile, int64_t kv_head, int64_t vector) const {
    const int64_t token = tile.first_token + vector / group_;
    return (token * p_.num_query_heads + kv_head * group_ + vector % group_) * p_.head_dim;
  }

  void start(const QueryTile& tile, int64_t kv_head, Scratch& s) const {
    std::fill(s.sums.begin(), s.sums.end(), 0.0f);
    for (int64_t v = 0; v < tile.num_queries * group_; ++v) {
      const float* q = p_.q + offset(tile, kv_head, v);
      for (int64_t h = 0; h < p_.head_dim; ++h) s.q[v * p_.head_dim + h] = q[h] * p_.scale;
      s.max_scores[v] = p_.sinks ? p_.sinks[kv_head * group_ + v % group_] : kMinusInfinity;
      s.weights[v] = p_.sinks ? 1.0f : 0.0f;
    }
  }

  // Scores of every vector with the tokens [block, end); those past `end` are garbage.
  void score_block(const QueryTile& tile, int64_t kv_head, int64_t block, int64_t end, Scratch& s) const {
    for (int64_t first = block; first < end; first += kChunk * W) {
      const Number* columns[kChunk];
      for (int c = 0; c < kChunk; ++c) {
        const int64_t position = std::min(first + c * W, (end - 1) / W * W);  // a column too many repeats the last
        columns[c] = keys(page_of(tile.row, position), kv_head) + position % p_.page_size;
      }
      const int64_t num_vectors = tile.num_queries * group_;
      for (int64_t v = 0; v < num_vectors; v += kGroup) {
        const int64_t count = std::min<int64_t>(kGroup, num_vectors - v);
        ByVectors<W, Number>::score_of[count - 1](&s.q[v * p_.head_dim], columns, p_.page_size, p_.head_dim,
                                                  &s.scores[v * kBlockTokens + first - block]);
      }
    }
  }

  // Turns one vector's scores of a block into weights, and takes them into its softmax.
  void absorb(int64_t position, int64_t vector, int64_t block, Scratch& s) const {
    float* scores = &s.scores[vector * kBlockTokens];
    const int32_t first = static_cast<int32_t>(std::max<int64_t>(0, first_key(position) - block));
    const int32_t end = static_cast<int32_t>(std::min(kBlockTokens, position + 1 - block));
    if (first >= end) {
      std::fill(scores, scores + kBlockTokens, 0.0f);
      return;
    }
    F<W> largest = all<W>(kMinusInfinity);
    for (int64_t t = 0; t < kBlockTokens; t += W) {
      F<W> score = load<W>(scores + t);
      if (p_.soft_cap > 0) score = capped(score);
      const I<W> token = lanes() + static_cast<int32_t>(t);
      score = (token >= first) & (token < end) ? score : all<W>(kMinusInfinity);
      largest = max<W>(largest, score);
      store<W>(scores + t, score);
    }
    const float max_score = std::max(s.max_scores[vector], max_lanes<W>(largest));
    F<W> total = {};
    for (int64_t t = 0; t < kBlockTokens; t += W) {
      const F<W> weight = exp_of_negative<W>(load<W>(scores + t) - max_score);
      total += weight;
      store<W>(scores + t, weight);
    }
    const float rescale = exp_of_negative<W>(all<W>(s.max_scores[vector] - max_score))[0];
    s.max_scores[vector] = max_score;
    s.weights[vector] = s.weights[vector] * rescale + sum_lanes<W>(total);
    if (rescale != 1.0f) {
      for (int64_t h = 0; h < p_.head_dim; ++h) s.sums[vector * p_.head_dim + h] *= rescale;
    }
  }

  static I<W> lanes() {
    I<W> index;
    for (int i = 0; i < W; ++i) index[i] = i;
    return index;
  }

  F<W> capped(const F<W>& score) const {  // soft_cap * tanh(score / soft_cap)
    const F<W> x = score / p_.soft_cap;
    const F<W> decay = exp_of_negative<W>((x < 0 ? x : -x) * 2.0f);
    const F<W> tanh_of_abs = (1.0f - decay) / (1.0f + decay);
    return (x < 0 ? -tanh_of_abs : tanh_of_abs) * p_.soft_cap;
  }

  // Adds the values of the tokens [first, end), page by page. Stale ones outside might be NaN: they are never read.
  void add_values(const QueryTile& tile, int64_t kv_head, int64_t first, int64_t end, int64_t block,
                  Scratch& s) const {
    const int64_t num_vectors = tile.num_queries * group_, H = p_.head_dim;
    for (int64_t position = first, next; position < end; position = next) {
      next = std::min(end, (position / p_.page_size + 1) * p_.page_size);
      const Number* value = values(page_of(tile.row, position), kv_head) + position % p_.page_size * H;
      for (int64_t v = 0; v < num_vectors; v += kGroup) {
        const int64_t count = std::min<int64_t>(kGroup, num_vectors - v);
        const float* weights = &s.scores[v * kBlockTokens + position - block];
        for (int64_t h = 0; h < H;) {
          const bool wide = h + kChunk * W <= H;
          const auto& by_vectors =
              wide ? ByVectors<W, Number>::accumulate_wide : ByVectors<W, Number>::accumulate_narrow;
          by_vectors[count - 1](weights, value + h, next - position, H, &s.sums[v * H + h]);
          h += wide ? kChunk * W : W;
        }
      }
    }
  }

  void finish(const QueryTile& tile, int64_t kv_head, const Scratch& s) const {
    for (int64_t v = 0; v < tile.num_queries * group_; ++v) {
      float* out = p_.out + offset(tile, kv_head, v);
      const float factor = 1.0f / s.weights[v];
      for (int64_t h = 0; h < p_.head_dim; ++h) out[h] = s.sums[v * p_.head_dim + h] * factor;
    }
  }

  const AttentionProblem& p_;
  const int64_t group_;         // query heads per kv head
  const int64_t page_numbers_;  // in the keys (or values) of one page and head
  Number* layer_;
  std::vector<QueryTile> tiles_;
  int64_t end_token_ = 0;
};

template <int W>
void attention_of_width(Executor& executor, const AttentionProblem& p) {
  if (p.is_bfloat16) {
    Attention<W, BFloat16>(p).run(executor);
  } else {
    Attention<W, float>(p).run(executor);
  }
}

inline void attention(Executor& executor, const AttentionProblem& p) {
  if (p.page_size % NATIVE_WIDTH == 0 && p.head_dim % NATIVE_WIDTH == 0) {
    attention_of_width<NATIVE_WIDTH>(executor, p);
  } else {
    attention_of_width<4>(executor, p);
  }
}

}  // namespace NATIVE_ISA
