// Low-rank terms of some tokens. Tokens are sorted by their matrices once per call. The inner vectors are the first tasks
// of the loop that multiplies the weights. A task adds its tokens' terms to the sums for a panel while these are in the
// first-level cache: the first tile of tokens at a panel has the terms of all tiles computed, so that each of the panel's
// matrices is read once. Each token's terms are computed in the same order whatever the other tokens are.

#pragma once

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "floats.h"

namespace NATIVE_ISA {

using native::GroupedProblem;
using native::Terms;

// Tokens whose terms are computed at once, as many as the registers hold.
#ifdef __aarch64__
constexpr int kTermTokens = 4;
#else
constexpr int kTermTokens = NATIVE_WIDTH == 16 ? 8 : NATIVE_WIDTH == 8 ? 4 : 2;
#endif
constexpr int64_t kInnerTasksPerThread = 2;
constexpr int64_t kMaxInnerTokens = 48;  // tokens of a task: other threads wait for the last one

inline void float_tile(const LinearProblem& p);

// Return the elements of a matrix in a format of floats from one of them on.
inline const void* elements_from(const void* from, native::WeightFormat format, int64_t element) {
  return static_cast<const char*>(from) + element * (format == native::WeightFormat::kFloat32 ? 4 : 2);
}

// The tokens of a call that have terms, by group and then by matrices, and their inner vectors.
class SortedTerms {
 public:
  // Consecutive tokens with the same matrices.
  struct Run {
    int64_t matrix, first, end;
  };

  SortedTerms(const Executor& executor, const LinearProblem& p, const int32_t* group_sizes, int64_t num_groups)
      : p_(p), first_runs_(num_groups + 1, 0) {
    std::vector<int32_t> next(p.terms->num_slots + 1);
    int64_t token = 0;
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t first = token, end = first + group_sizes[group];
      std::fill(next.begin(), next.end(), 0);
      for (; token < end; ++token) ++next[p.terms->slots[token]];
      int32_t position = static_cast<int32_t>(tokens_.size());
      for (int64_t slot = 1; slot <= p.terms->num_slots; ++slot) {
        const int32_t size = next[slot];
        if (size > 0) runs_.push_back({(slot - 1) * num_groups + group, position, position + size});
        next[slot] = position;
        position += size;
      }
      tokens_.resize(position);
      for (int64_t t = first; t < end; ++t) {
        const int64_t slot = p.terms->slots[t];
        if (slot > 0) tokens_[next[slot]++] = static_cast<int32_t>(t);
      }
      first_runs_[group + 1] = static_cast<int64_t>(runs_.size());
    }
    const int64_t num_tokens = static_cast<int64_t>(tokens_.size()), wanted = executor.num_threads() * kInnerTasksPerThread;
    const int64_t most = std::clamp<int64_t>((num_tokens + wanted - 1) / wanted, kMaxTileTokens, kMaxInnerTokens);
    for (const Run& run : runs_) {
      const Tiles tasks(run.end - run.first, most);
      for (int64_t i = 0; i < tasks.size(); ++i) {
        tasks_.push_back({run.matrix, run.first + tasks.start(i), run.first + tasks.start(i + 1)});
      }
    }
    struct Inner;
    inner_ = scratch<Inner>(num_tokens * size());
  }

  int64_t num_tasks() const { return static_cast<int64_t>(tasks_.size()); }

  // Compute the inner vectors of a task's tokens.
  void run(int64_t task) {
    const Terms& terms = *p_.terms;
    const Run& run = tasks_[task];
    const Tiles tiles(run.end - run.first, kMaxTileTokens);
    for (int64_t i = 0; i < tiles.size(); ++i) {
      const int64_t first = run.first + tiles.start(i);
      LinearProblem tile{};
      tile.x = terms.x ? native::Activations{const_cast<float*>(terms.x), false} : p_.x;
      tile.norm = terms.x ? nullptr : p_.norm;
      tile.eps = p_.eps;
      tile.weight = elements_from(terms.a, terms.format, run.matrix * size() * terms.num_inputs);
      tile.format = terms.format;
      tile.y = {inner_ + first * size(), false};
      tile.num_tokens = tiles.start(i + 1) - tiles.start(i);
      tile.num_outputs = size();
      tile.num_inputs = tile.group_size = terms.num_inputs;
      if (tile.num_tokens == 1) {  // a lone token may be used as it is
        tile.x = tile.x.from(tokens_[first] * terms.num_inputs);
      } else {
        tile.rows = tokens_.data() + first;
      }
      float_tile(tile);
    }
    num_done_.fetch_add(1, std::memory_order_release);
  }

  // Wait until all inner vectors are computed. Other threads compute them: tasks begin in order.
  void wait() const {
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < num_tasks(); ++spins) {
      if (spins > 4096) std::this_thread::yield();
    }
  }

  // The runs of a group are those from first_run(group) to first_run(group + 1).
  int64_t first_run(int64_t group) const { return first_runs_[group]; }
  const Run& run_at(int64_t index) const { return runs_[index]; }
  const int32_t* tokens() const { return tokens_.data(); }
  // Return the inner vectors of the parts, of the token at a position in their order.
  const float* inner(int64_t position) const { return inner_ + position * size(); }
  int64_t size() const { return p_.terms->num_parts * p_.terms->rank; }

 private:

  const LinearProblem& p_;
  std::vector<Run> runs_, tasks_;
  std::vector<int64_t> first_runs_;
  std::vector<int32_t> tokens_;
  float* inner_;
  std::atomic<int64_t> num_done_{0};
};

// The terms of a group's tokens; of none if `sorted` is null.
struct GroupTerms {
  const SortedTerms* sorted = nullptr;
  int64_t first_run = 0, end_run = 0, first_token = 0;

  GroupTerms() = default;
  GroupTerms(const SortedTerms& terms, int64_t group, int64_t first_token)
      : sorted(terms.first_run(group) < terms.first_run(group + 1) ? &terms : nullptr),
        first_run(terms.first_run(group)), end_run(terms.first_run(group + 1)), first_token(first_token) {}
};

// Return the row of a lane of a panel of b; the last row for padding.
inline int64_t term_row(const Terms& terms, int64_t panel, int64_t lane) {
  constexpr int64_t kHalf = kPanelRows / 2;
  const int64_t num_rows = terms.part_ends[terms.num_parts - 1];
  const int64_t gated_row = lane / kHalf * (num_rows / 2) + panel * kHalf + lane % kHalf;
  return std::min(terms.gated ? gated_row : panel * kPanelRows + lane, num_rows - 1);
}

// Parts of the rows in a vector: the i-th one is in the lanes from firsts[i] on.
struct LaneParts {
  int num_parts = 0;
  int firsts[NATIVE_WIDTH];
  int64_t offsets[NATIVE_WIDTH];  // of the parts' inner vectors

  LaneParts() = default;
  LaneParts(const Terms& terms, int64_t panel, int first_lane) {
    constexpr int kRun = std::min<int>(NATIVE_WIDTH, kPanelRows / 2);  // lanes with consecutive rows
    for (int lane = 0; lane < NATIVE_WIDTH; lane += kRun) {
      const int64_t first = offset(terms, panel, first_lane + lane), last = offset(terms, panel, first_lane + lane + kRun - 1);
      add(lane, first);
      for (int i = 1; first != last && i < kRun; ++i) add(lane + i, offset(terms, panel, first_lane + lane + i));
    }
  }

 private:
  void add(int lane, int64_t offset) {
    if (num_parts > 0 && offsets[num_parts - 1] == offset) return;
    firsts[num_parts] = lane;
    offsets[num_parts++] = offset;
  }

  static int64_t offset(const Terms& terms, int64_t panel, int64_t lane) {
    int64_t part = 0;
    for (const int64_t row = term_row(terms, panel, lane); terms.part_ends[part] <= row;) ++part;
    return part * terms.rank;
  }
};

// Write the products of some tokens' inner vectors, `stride` floats apart, with a panel of their matrix. `Whole` if each
// vector of rows is in one part.
template <typename Number, int Tokens, bool Whole>
inline NATIVE_INLINE void multiply_inner(const float* inner, int64_t stride, const Number* b, int64_t rank,
                                         const LaneParts (&parts)[kVectors], float* to) {
  constexpr int W = NATIVE_WIDTH, V = kVectors;
  const I<W> lanes = lane_numbers<W>();
  F<W> sums[Tokens][V] = {};
  for (int64_t k = 0; k < rank; ++k, b += kPanelRows) {
    F<W> w[V];
    unrolled<V>([&](int v) NATIVE_INLINE { w[v] = load<W>(b + v * W); });
    unrolled_pairs<Tokens, V>([&](int t, int v) NATIVE_INLINE {
      const float* from = inner + t * stride + k;
      F<W> input = all<W>(from[parts[v].offsets[0]]);
      if constexpr (!Whole) {
        for (int i = 1; i < parts[v].num_parts; ++i) {
          input = lanes >= parts[v].firsts[i] ? all<W>(from[parts[v].offsets[i]]) : input;
        }
      }
      sums[t][v] = fma<W>(input, w[v], sums[t][v]);
    });
  }
  unrolled_pairs<Tokens, V>([&](int t, int v) NATIVE_INLINE { store<W>(to + t * kPanelRows + v * W, sums[t][v]); });
}

// The terms of a task's tokens, for a few panels at a time.
class TaskTerms {
 public:
  TaskTerms(const LinearProblem& p, const GroupTerms& group, int64_t first_token, int64_t end_token)
      : terms_(*p.terms), sorted_(*group.sorted), num_panels_(num_panels(p)), first_token_(first_token),
        positions_(end_token - first_token, -1) {
    const int64_t first = group.first_token + first_token, last = group.first_token + end_token;
    for (int64_t index = group.first_run; index < group.end_run; ++index) {
      const SortedTerms::Run& run = sorted_.run_at(index);
      const int32_t *tokens = sorted_.tokens(), *end = tokens + run.end;
      const int32_t* next = std::lower_bound(tokens + run.first, end, first);
      const int64_t begin = next - tokens;
      for (; next < end && *next < last; ++next) positions_[*next - first] = static_cast<int32_t>(num_tokens_++);
      if (next - tokens > begin) runs_.push_back({run.matrix, begin, next - tokens});
    }
    struct Sums;
    sums_ = scratch<Sums>(kGroupPanels * num_tokens_ * kPanelRows);
    std::fill_n(panels_, kGroupPanels, -1);
    if (terms_.shift || terms_.factor) {
      matrices_.reserve(num_tokens_);
      for (const SortedTerms::Run& run : runs_) matrices_.insert(matrices_.end(), run.end - run.first, run.matrix);
    }
  }

  void add(int64_t first_token, int64_t num_tokens, int64_t panel, float* sums, int64_t stride) {
    constexpr int W = NATIVE_WIDTH;
    const float* from = sums_of(panel);
    const int32_t* positions = positions_.data() + (first_token - first_token_);
    for (int64_t t = 0; t < num_tokens; ++t, sums += stride) {
      if (positions[t] < 0) continue;
      const float* values = from + positions[t] * kPanelRows;
      unrolled<kVectors>([&](int v) NATIVE_INLINE {
        store<W>(sums + v * W, load<W>(sums + v * W) + load<W>(values + v * W));
      });
      if (!matrices_.empty()) add_vectors(matrices_[positions[t]], panel, sums);
    }
  }

 private:
  void add_vectors(int64_t matrix, int64_t panel, float* sums) const {
    const int64_t num_rows = terms_.part_ends[terms_.num_parts - 1];
    for (int64_t lane = 0; lane < kPanelRows; ++lane) {
      const int64_t at = matrix * num_rows + term_row(terms_, panel, lane);
      if (terms_.shift) sums[lane] += terms_.shift[at];
      if (terms_.factor) sums[lane] *= terms_.factor[at];
    }
  }

  // Return the terms for a panel of the tokens that have terms, sorted.
  const float* sums_of(int64_t panel) {
    const int64_t slot = panel % kGroupPanels;
    float* sums = sums_ + slot * num_tokens_ * kPanelRows;
    if (panels_[slot] == panel) return sums;
    panels_[slot] = panel;
    sorted_.wait();
    switch (terms_.format) {
      case native::WeightFormat::kBFloat16: compute<BFloat16>(panel, sums); break;
      case native::WeightFormat::kFloat16: compute<Float16>(panel, sums); break;
      default: compute<float>(panel, sums);
    }
    return sums;
  }

  template <typename Number>
  __attribute__((noinline)) void compute(int64_t panel, float* sums) const {
    LaneParts parts[kVectors];
    bool is_whole = true;
    for (int v = 0; v < kVectors; ++v) {
      parts[v] = LaneParts(terms_, panel, v * NATIVE_WIDTH);
      is_whole &= parts[v].num_parts == 1;
    }
    const int64_t panel_size = terms_.rank * kPanelRows;
    const auto* panels = static_cast<const Number*>(terms_.b) + panel * panel_size;
    const int64_t matrix_size = num_panels_ * panel_size;
    for (const SortedTerms::Run& run : runs_) {
      const Number* b = panels + run.matrix * matrix_size;
      for (int64_t i = 0; i < panel_size; i += kLineBytes / sizeof(Number)) __builtin_prefetch(b + panel_size + i);
      const int64_t num_tokens = run.end - run.first;
      for (int64_t t = 0; t < num_tokens; t += kTermTokens, sums += kTermTokens * kPanelRows) {
        const float* inner = sorted_.inner(run.first + t);
        with_tokens_at_once(std::min<int64_t>(kTermTokens, num_tokens - t), [&](auto tokens) {
          if (is_whole) {
            multiply_inner<Number, decltype(tokens)::value, true>(inner, sorted_.size(), b, terms_.rank, parts, sums);
          } else {
            multiply_inner<Number, decltype(tokens)::value, false>(inner, sorted_.size(), b, terms_.rank, parts, sums);
          }
        });
      }
      sums -= (kTermTokens - num_tokens % kTermTokens) % kTermTokens * kPanelRows;  // the last tokens were fewer
    }
  }

  // Call use(number) with the constant for `num_tokens`.
  template <int Tokens = kTermTokens, typename Use>
  static void with_tokens_at_once(int64_t num_tokens, const Use& use) {
    if constexpr (Tokens > 1) {
      if (num_tokens < Tokens) return with_tokens_at_once<Tokens - 1>(num_tokens, use);
    }
    use(std::integral_constant<int, Tokens>{});
  }

  const Terms& terms_;
  const SortedTerms& sorted_;
  int64_t num_panels_, first_token_, num_tokens_ = 0;  // num_tokens_ have terms
  std::vector<int32_t> positions_;  // of tokens in the sums; -1 for those without terms
  std::vector<SortedTerms::Run> runs_;
  std::vector<int64_t> matrices_;  // of each position, if there are vectors
  float* sums_;
  int64_t panels_[kGroupPanels];
};

static void add_terms(const LinearProblem& p, int64_t first_token, int64_t num_tokens, int64_t panel, float* sums,
                      int64_t stride) {
  static_cast<TaskTerms*>(p.task_terms)->add(first_token, num_tokens, panel, sums, stride);
}

// Tokens of a matrix without columns: they have only terms.
class NoColumns {
 public:
  using Format = Floats<float>;
  static int64_t task_tokens(const LinearProblem&) { return kCachedTokens; }
  static int64_t size(const LinearProblem&) { return 0; }

  NoColumns(Executor&, const LinearProblem& p, float*) : tiles_(p.num_tokens, kMaxTileTokens) {}

  int64_t num_tiles() const { return tiles_.size(); }
  int64_t first_token(int64_t tile) const { return tiles_.start(tile); }
  int64_t panels_at_once() const { return 1; }

 private:
  Tiles tiles_;
};

// Write y of some tiles of tokens for a range of panels.
inline void multiply_blocks(const LinearProblem& p, const NoColumns& tokens, int64_t first_tile, int64_t end_tile,
                            int64_t first_panel, int64_t end_panel) {
  for (int64_t panel = first_panel; panel < end_panel; ++panel) {
    for (int64_t t = tokens.first_token(first_tile); t < tokens.first_token(end_tile); ++t) {
      F<NATIVE_WIDTH> sums[1][kVectors] = {};
      finish_copy<1, 1>(p, t, panel, sums);
    }
  }
}

inline void multiply_panels(const LinearProblem& p, const NoColumns& tokens, int64_t panel, int64_t end_panel) {
  multiply_blocks(p, tokens, 0, 1, panel, end_panel);
}

}  // namespace NATIVE_ISA
