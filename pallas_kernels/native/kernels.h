// The kernels, compiled once per instruction set; the rest of the library sees only this table of functions.

#pragma once

#include <cstdint>

#include "parallel.h"

namespace native {

constexpr int64_t kPanelRows = 16;  // rows of a packed matrix stored side by side

enum class WeightFormat { kFloat32, kBFloat16, kFloat16, kInt8, kInt4, kFloat8, kFloat4 };

// What a product makes of its inputs: floats as they are, or each group of a token's columns rounded to int8 or fp8 (e4m3)
// with a scale, as jaxserve/layers/weight_formats/activations.py does. Int8 inputs are for weights of 4 or 8 bits in
// words, fp8 inputs for fp8 weights. Inputs for bfloat16 weights may be rounded to bfloat16.
enum class InputFormat { kFloat32, kInt8, kFloat8, kBFloat16 };

// Inputs or outputs in memory, as float32 or bfloat16; computed in float32 in both cases.
struct Activations {
  void* data;  // null for none
  bool is_bfloat16;

  explicit operator bool() const { return data != nullptr; }
  // Return the activations from an element on.
  Activations from(int64_t element) const {
    return {static_cast<char*>(data) + element * (is_bfloat16 ? 2 : 4), is_bfloat16};
  }
};

// Low-rank terms of some tokens, as LoRA adapters have: a token with matrices i has (x * weight^T + x * a[i]^T * b[i]^T +
// shift[i]) * factor[i] in place of x * weight^T. The outputs are parts, each with inner vectors x * a^T of its own. Tokens
// without terms have the bits of a call without terms.
struct Terms {
  const int32_t* slots;  // [T]: 0 for tokens without terms, else 1 + i; in grouped products also by the token's group
  const float* x;        // [T, K] if inputs of `a` are not those of the product, after its norm; else null
  const void* a;         // [S, parts * rank, K], packed as weights are
  const void* b;         // [S, rows, rank], packed in panels with the rows of the weights' panels
  WeightFormat format;   // of a and b, floats
  bool gated;            // whether panels of b have 8 rows of the gate beside the 8 that they gate
  const float* shift;    // [S, rows]; null for none
  const float* factor;   // [S, rows]; null for none
  const int32_t* part_ends;  // [parts], the row after each part's last
  int64_t num_slots, num_parts, rank, num_inputs;
};

// y[T, N] = x[T, K] * weight^T + bias[N] + residual[T, N], with weight packed as [N / 16, K, 16] (last panel padded).
// A gated matrix stores each 8 rows of the gate beside the 8 rows that they gate, [N / 8, K, 2, 8], and has a bias
// [2, N]: y = silu(x * gate^T + bias[0]) * (x * up^T + bias[1]) + residual.
// In formats of 8 and 4 bits each `group_size` columns have a scale per row, and integers may have a zero point: a weight
// stands for (element - zero) * scale. 4 elements of int8, or 8 of int4, unsigned, or of fp4 (e2m1), are a word, the first
// in its lowest bits; groups begin words.
struct LinearProblem {
  Activations x;
  const float* norm;  // [K]: x is replaced by x / sqrt(mean(x^2) + eps) * norm; null for no norm
  float eps;
  const float* bias;      // null for none
  Activations residual;
  const void* weight;
  WeightFormat format;
  bool gated;
  const float* scales;  // shaped as weight, with K / group_size in place of K; null for floats
  const float* zeros;   // shaped as scales, for integers; null for zero points of 0 (int8) or 8 (int4)
  int64_t group_size;   // K without scales
  InputFormat input_format;
  Activations y;
  int64_t num_tokens, num_outputs, num_inputs;
  const Terms* terms;   // null if no token has terms
  void* task_terms;     // the TaskTerms (terms.h) of a task's tokens, which the kernels compute from `terms`; or null
  const int32_t* rows;  // [T], rows of x that the tokens are; null if they are in order
};

// Products of consecutive tokens with weights of their own: group g has group_sizes[g] of them, and its weights, scales
// and zero points follow those of group g - 1. `all` has the tokens of all groups, and the weights of the first, without
// norm, bias and residual. y of tokens behind the last group is 0.
struct GroupedProblem {
  LinearProblem all;
  const int32_t* group_sizes;
  int64_t num_groups;
};

enum class PoolFormat { kFloat32, kBFloat16, kInt8, kFloat8, kInt4 };

// Groups of an int4 pool, as pallas_kernels/ragged_paged_attention/int4.py has them.
constexpr int64_t kInt4Group = 64;
constexpr int64_t kInt4Numbers = 4;  // bytes of a group's step and least element
constexpr int64_t int4_group(int64_t head_dim) { return head_dim % kInt4Group ? head_dim : kInt4Group; }

// Return the elements of a pool's array that hold a vector.
constexpr int64_t stored_size(PoolFormat format, int64_t head_dim) {
  if (format != PoolFormat::kInt4) return head_dim;
  return head_dim / 2 + head_dim / int4_group(head_dim) * kInt4Numbers;
}

// Ragged paged attention; see pallas_kernels/ragged_paged_attention. Pages of a KV head: keys [H, P], values [P, H].
// In int4 pools, H stands for the bytes of a vector. Int8 and fp8 pools have a scale for each vector.
// With latents (kinds.py there) a page is [P, H]: every token's key, which begins with its value.
struct AttentionProblem {
  Activations qkv;    // [T, Q + 2K, H], heads of q, then k, then v; [T, Q + 1, H], heads of q, then the latent
  const float* rope;  // [2, T, H / 2], cosines and sines that rotate q and k, of latents what is behind the value, or null
  void* pool;  // [L, N, K, 2, P * H] or, of latents, [L, N, P, H]
  PoolFormat format;
  void* scales;  // bfloat16 [L, N, K, 2, P] of int8 and fp8 pools, [L, N, P] of latents
  bool has_latents;
  const int32_t* kv_lens;
  const int32_t* page_table;  // [R, M], or any rows if there is a table_row
  const int32_t* table_row;   // [R], row of the page table that each row's pages are in; null if they are in order
  const int32_t* cu_q_lens;
  const float* sinks;  // [Q] or null
  const int32_t* tree_mask;  // [T], a word of visible nodes per token; null for no trees
  Activations out;     // [T, Q, value_dim]
  int64_t num_tokens, num_rows, table_width;
  int64_t layer, num_pages, page_size;
  int64_t num_query_heads, num_kv_heads, head_dim, value_dim;  // value_dim is head_dim without latents
  float scale, soft_cap;  // soft_cap 0 for none
  int64_t window;         // 0 for none
  int64_t max_queries;    // most new tokens of a row that attends, others have no outputs; 0 for all; if it is -1, only
                          // the last new token of each row attends
  bool sees_all;          // whether a query sees all tokens of its row, later ones too; rows then share no pages
};

struct Kernels {
  void (*float_tile)(const LinearProblem&);  // of as few tokens as a tile has, with weights of floats, on this thread
  void (*linear)(Executor&, const LinearProblem&);
  void (*grouped_linear)(Executor&, const GroupedProblem&);
  void (*attention)(Executor&, const AttentionProblem&);
};

namespace amx {
extern const Kernels kernels;
}
namespace avx512vnni {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avxvnni {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace neondot {
extern const Kernels kernels;
}
namespace generic {
extern const Kernels kernels;
}

}  // namespace native
