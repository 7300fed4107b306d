// The kernels, once per instruction set. A table of functions is all that the rest of the library sees of them.

#pragma once

#include <cstdint>

#include "parallel.h"

namespace native {

constexpr int64_t kPanelRows = 16;  // rows of a packed matrix that lie side by side

enum class WeightFormat { kFloat32, kBFloat16, kInt8 };

// y[T, N] = x[T, K] * weight^T + bias[N] + residual[T, N], weight packed as [N / 16, K, 16] (the last panel padded).
// A gated matrix has beside each 8 rows of a gate the 8 that they gate, [N / 8, K, 2, 8], and a bias [2, N]:
// y = silu(x * gate^T + bias[0]) * (x * up^T + bias[1]) + residual.
struct LinearProblem {
  const float* x;
  const float* norm;  // [K]: x is replaced by x / sqrt(mean(x^2) + eps) * norm; null: it is not
  float eps;
  const float* bias;      // null: none
  const float* residual;  // null: none
  const void* weight;
  WeightFormat format;
  bool gated;
  const float* scales;  // as weight, K / scale_block in the place of K; read for int8 alone
  int64_t scale_block;  // K where there are no scales
  float* y;
  int64_t num_tokens, num_outputs, num_inputs;
};

// Ragged paged attention; see pallas_kernels/ragged_paged_attention. Pages of a kv head: keys [H, P], values [P, H].
struct AttentionProblem {
  const float* qkv;   // [T, Q + 2K, H], the heads of q, then k, then v
  const float* rope;  // [2, T, H / 2], cosines and sines of the angles q and k are rotated by; null: none
  void* pool;  // [L, N, K, 2, P * H] of float or bfloat16
  bool is_bfloat16;
  const int32_t* kv_lens;
  const int32_t* page_table;  // [R, M]
  const int32_t* cu_q_lens;
  const float* sinks;  // [Q] or null
  float* out;          // [T, Q, H]
  int64_t num_tokens, num_rows, table_width;
  int64_t layer, num_pages, page_size;
  int64_t num_query_heads, num_kv_heads, head_dim;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
};

struct Kernels {
  void (*linear)(Executor&, const LinearProblem&);
  void (*attention)(Executor&, const AttentionProblem&);
};

namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace generic {
extern const Kernels kernels;
}

}  // namespace native
