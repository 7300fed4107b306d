// Low-rank terms of some tokens: inner vectors by a product for each adapter, and their products with an adapter's second
// factors, which are added to a token's sums while these are in the first-level cache. Each token's terms are computed in
// the same order whatever the other tokens are.

#pragma once

#include <vector>

#include "products.h"

namespace NATIVE_ISA {

using native::GroupedProblem;
using native::Terms;
using native::TokenTerm;

constexpr int kTermTokens = 4;  // tokens at once, so that additions do not wait for each other

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

// Return the products of `kTermTokens` tokens' inner vectors with a vector of rows in their matrices. `Same` if these
// are one matrix, `Whole` if all rows are in one part.
template <typename Number, bool Same, bool Whole>
inline NATIVE_INLINE void multiply_terms(const float* const (&inner)[kTermTokens], const Number* const (&b)[kTermTokens],
                                         int64_t rank, const LaneParts& parts, F<NATIVE_WIDTH> (&sums)[kTermTokens]) {
  constexpr int W = NATIVE_WIDTH;
  const I<W> lanes = lane_numbers<W>();
  for (int64_t k = 0; k < rank; ++k) {
    F<W> w[kTermTokens];
    unrolled<Same ? 1 : kTermTokens>([&](int t) NATIVE_INLINE { w[t] = load<W>(b[t] + k * kPanelRows); });
    unrolled<kTermTokens>([&](int t) NATIVE_INLINE {
      F<W> input = all<W>(inner[t][parts.offsets[0] + k]);
      if constexpr (!Whole) {
        for (int i = 1; i < parts.num_parts; ++i) {
          input = lanes >= parts.firsts[i] ? all<W>(inner[t][parts.offsets[i] + k]) : input;
        }
      }
      sums[t] = fma<W>(input, w[Same ? 0 : t], sums[t]);
    });
  }
}

template <typename Number>
void add_terms_of(const LinearProblem& p, int64_t first_token, int64_t num_tokens, int64_t panel, float* sums,
                  int64_t stride) {
  constexpr int W = NATIVE_WIDTH;
  const Terms& terms = *p.terms;
  const int64_t num_rows = terms.part_ends[terms.num_parts - 1], panel_size = terms.rank * kPanelRows;
  const auto* panels = static_cast<const Number*>(terms.b) + panel * panel_size;
  const int64_t matrix_size = num_panels(p) * panel_size;
  for (int v = 0; v < kVectors; ++v) {
    const LaneParts parts(terms, panel, v * W);
    for (int64_t next = 0; next < num_tokens;) {
      int64_t tokens[kTermTokens];
      int num_found = 0;
      for (; next < num_tokens && num_found < kTermTokens; ++next) {
        if (p.token_terms[first_token + next].inner) tokens[num_found++] = next;
      }
      if (num_found == 0) break;
      const float* inner[kTermTokens];
      const Number* b[kTermTokens];
      bool is_same = true;
      for (int t = 0; t < kTermTokens; ++t) {  // the last token again in place of others
        const TokenTerm& term = p.token_terms[first_token + tokens[std::min(t, num_found - 1)]];
        inner[t] = term.inner;
        b[t] = panels + term.matrix * matrix_size + v * W;
        is_same &= b[t] == b[0];
      }
      F<W> found[kTermTokens] = {};
      if (parts.num_parts > 1) {
        multiply_terms<Number, false, false>(inner, b, terms.rank, parts, found);
      } else if (is_same) {
        multiply_terms<Number, true, true>(inner, b, terms.rank, parts, found);
      } else {
        multiply_terms<Number, false, true>(inner, b, terms.rank, parts, found);
      }
      for (int t = 0; t < num_found; ++t) {
        float* to = sums + tokens[t] * stride + v * W;
        F<W> sum = load<W>(to) + found[t];
        const int64_t first = p.token_terms[first_token + tokens[t]].matrix * num_rows;
        for (int lane = 0; lane < W && (terms.shift || terms.factor); ++lane) {
          const int64_t at = first + term_row(terms, panel, v * W + lane);
          if (terms.shift) sum[lane] += terms.shift[at];
          if (terms.factor) sum[lane] *= terms.factor[at];
        }
        store<W>(to, sum);
      }
    }
  }
}

static void add_terms(const LinearProblem& p, int64_t first_token, int64_t num_tokens, int64_t panel, float* sums,
                      int64_t stride) {
  switch (p.terms->format) {
    case native::WeightFormat::kBFloat16: return add_terms_of<BFloat16>(p, first_token, num_tokens, panel, sums, stride);
    case native::WeightFormat::kFloat16: return add_terms_of<Float16>(p, first_token, num_tokens, panel, sums, stride);
    default: return add_terms_of<float>(p, first_token, num_tokens, panel, sums, stride);
  }
}

// Tokens with terms, sorted by their matrices.
struct SortedTerms {
  std::vector<int32_t> rows, sizes;  // the tokens, and how many there are for each matrix

  SortedTerms(const LinearProblem& p, const int32_t* group_sizes, int64_t num_groups, std::vector<TokenTerm>& terms) {
    sizes.assign(p.terms->num_slots * num_groups, 0);
    int64_t token = 0, num_found = 0;
    for (int64_t group = 0; group < num_groups; ++group) {
      for (const int64_t end = token + group_sizes[group]; token < end; ++token) {
        const int64_t slot = p.terms->slots[token];
        terms[token] = {nullptr, slot > 0 ? (slot - 1) * num_groups + group : -1};
        if (slot > 0) ++sizes[terms[token].matrix], ++num_found;
      }
    }
    std::vector<int32_t> next(sizes.size(), 0);
    for (size_t i = 1; i < sizes.size(); ++i) next[i] = next[i - 1] + sizes[i - 1];
    rows.resize(num_found);
    for (int64_t t = 0; t < token; ++t) {
      if (terms[t].matrix >= 0) rows[next[terms[t].matrix]++] = static_cast<int32_t>(t);
    }
  }
};

}  // namespace NATIVE_ISA
