// Matrix products with packed weights: panels of 16 rows, so that weights stream in order and every vector of them is
// used for many tokens. A token's result is bit-identical whatever the other tokens are.
//
// Groups of tokens with weights of their own are as many products, whose tasks the threads share. The weights of a group
// without tokens are not read.

#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "amx_digits.h"
#include "digits.h"
#include "floats.h"
#include "terms.h"

namespace NATIVE_ISA {

#ifdef NATIVE_AMX
using TokensForBFloat16 = TermTokens<3>;
using RoundedTokensForBFloat16 = TermTokens<1>;
#else
using TokensForBFloat16 = PackedTokens<Floats<BFloat16>>;
using RoundedTokensForBFloat16 = TokensForBFloat16;
#endif
#ifdef NATIVE_INT8_DIGITS
using TokensForInt8 = DigitTokens<Int8Digits>;
#else
using TokensForInt8 = PackedTokens<Int8>;
#endif
#ifdef NATIVE_DIGITS
using TokensForInt4 = DigitTokens<Int4Digits>;
#else
using TokensForInt4 = PackedTokens<Int4>;
#endif

// Return as many tasks as keep all threads busy to the end; one for little work.
inline int64_t wanted_tasks(const Executor& executor, const LinearProblem& p) {
  int64_t token_products = num_panels(p) * kPanelRows * p.num_inputs;
  if (const Terms* terms = p.terms) {
    token_products += terms->rank * (terms->num_parts * terms->num_inputs + num_panels(p) * kPanelRows);
  }
  return p.num_tokens * token_products < kSerialProducts ? 1 : executor.num_threads() * kTasksPerThread;
}

// Multiply some tiles of tokens with a range of panels.
template <typename Tokens>
void multiply_part(const LinearProblem& p, const Tokens& tokens, int64_t tile, int64_t end_tile, const PanelPart& here,
                   const PanelPart&) {
  if (tokens.num_tiles() == 1) return multiply_panels(p, tokens, here.panel, here.end_panel);
  multiply_blocks(p, tokens, tile, end_tile, here.panel, here.end_panel);
}

// A product cut into tasks. A task is a range of panels, with many tokens times a block of tiles.
template <typename Tokens>
class Product {
 public:
  Product(Executor& executor, const LinearProblem& p, const GroupTerms& terms, float* buffer, int64_t wanted_tasks)
      : p_(p), terms_(terms), tokens_(executor, p, buffer), passes_(passes_of(tokens_)), num_threads_(executor.num_threads()) {
    const int64_t task_tokens = Tokens::task_tokens(p), unit_panels = tokens_.panels_at_once();
    num_panels_ = num_panels(p);
    num_blocks_ = (p.num_tokens + task_tokens - 1) / task_tokens;
    unit_panels_ = unit_panels;
    num_units_ = (num_panels_ + unit_panels_ - 1) / unit_panels_;
    num_ranges_ = std::clamp<int64_t>(wanted_tasks / num_blocks_, 1, num_units_);
    if (passes_.shares_tokens && wanted_tasks > 1) num_ranges_ = num_units_;
  }

  int64_t num_parts() const { return passes_.num_parts; }
  int64_t num_tasks() const { return num_blocks_ * num_ranges_; }  // of a part

  // Run a task of a part, after the same task of all parts before it.
  void run(int64_t task, int64_t part) const {
    const int64_t block = passes_.shares_tokens ? task / num_ranges_ : task % num_blocks_;
    const int64_t num_tiles = tokens_.num_tiles();
    const int64_t first_tile = block * num_tiles / num_blocks_, end_tile = (block + 1) * num_tiles / num_blocks_;
    const PanelPart here = panels_of(task, part), ahead = panels_of(task + num_threads_, part);
    if (!terms_.sorted) return multiply_part(p_, tokens_, first_tile, end_tile, here, ahead);
    TaskTerms task_terms(p_, terms_, tokens_.first_token(first_tile), tokens_.first_token(end_tile));
    LinearProblem p = p_;
    p.task_terms = &task_terms;
    multiply_part(p, tokens_, first_tile, end_tile, here, ahead);
  }

 private:
  // Return the panels of a task, which may be one of the next part; none past the last.
  PanelPart panels_of(int64_t task, int64_t part) const {
    if (task >= num_tasks()) task -= num_tasks(), ++part;
    if (task >= num_tasks() || part >= num_parts()) return {num_panels_, num_panels_, 0};
    const int64_t range = passes_.shares_tokens ? task % num_ranges_ : task / num_blocks_;
    return {start(range), start(range + 1), part};
  }

  // Return the first panel of a range. Ranges differ by one unit at most.
  int64_t start(int64_t range) const { return std::min(range * num_units_ / num_ranges_ * unit_panels_, num_panels_); }

  const LinearProblem& p_;
  const GroupTerms& terms_;
  Tokens tokens_;
  Passes passes_;
  int64_t num_threads_, num_panels_, num_blocks_, unit_panels_, num_units_, num_ranges_;
};

template <typename Tokens>
void linear(Executor& executor, const LinearProblem& p) {
  if (p.num_tokens == 0) return;
  if constexpr (!std::is_same_v<Tokens, NoColumns>) {
    if (p.num_inputs == 0) return linear<NoColumns>(executor, p);
  }
  const int32_t num_tokens = static_cast<int32_t>(p.num_tokens);
  std::optional<SortedTerms> sorted;
  GroupTerms terms;
  if (p.terms) terms = GroupTerms(sorted.emplace(executor, p, &num_tokens, 1), 0, 0);
  const int64_t wanted = wanted_tasks(executor, p);
  const Product<Tokens> product(executor, p, terms, scratch<Tokens>(Tokens::size(p)), wanted);
  native::SerialExecutor serial;
  for (int64_t part = 0; part < product.num_parts(); ++part) {
    const int64_t num_inner = sorted && part == 0 ? sorted->num_tasks() : 0;
    parallel_for(wanted == 1 ? serial : executor, num_inner + product.num_tasks(), [&](int64_t task) {
      task < num_inner ? sorted->run(task) : product.run(task - num_inner, part);
    });
  }
}

// The product of a group's tokens.
struct GroupProduct {
  LinearProblem problem;
  GroupTerms terms;
};

// Return the products of the groups that have tokens.
template <typename Format>
std::vector<GroupProduct> group_products(const GroupedProblem& p, const SortedTerms* terms) {
  const int64_t K = p.all.num_inputs, num_groups = K / p.all.group_size;
  const int64_t matrix_rows = num_panels(p.all) * kPanelRows, matrix_scales = matrix_rows * num_groups;
  const int64_t matrix_elements = matrix_scales * group_elements<Format>(p.all.group_size);
  std::vector<GroupProduct> products;
  for (int64_t g = 0, first = 0; g < p.num_groups; first += p.group_sizes[g++]) {
    if (p.group_sizes[g] == 0) continue;
    LinearProblem product = p.all;
    product.num_tokens = p.group_sizes[g];
    product.x = product.x.from(first * K);
    product.y = product.y.from(first * product.num_outputs);
    product.weight = static_cast<const typename Format::Weight*>(product.weight) + g * matrix_elements;
    if (product.scales) product.scales += g * matrix_scales;
    if (product.zeros) product.zeros += g * matrix_scales;
    products.push_back({product, terms ? GroupTerms(*terms, g, first) : GroupTerms()});
  }
  return products;
}

template <typename Tokens>
void grouped_linear(Executor& executor, const GroupedProblem& p) {
  std::optional<SortedTerms> sorted;
  if (p.all.terms) sorted.emplace(executor, p.all, p.group_sizes, p.num_groups);
  const std::vector<GroupProduct> groups = group_products<typename Tokens::Format>(p, sorted ? &*sorted : nullptr);
  int64_t size = 0, num_tokens = 0, num_tasks = sorted ? sorted->num_tasks() : 0;
  const int64_t num_inner = num_tasks;
  for (const GroupProduct& group : groups) {
    size += Tokens::size(group.problem);
    num_tokens += group.problem.num_tokens;
  }
  fill_with_zeros(p.all.y, num_tokens * p.all.num_outputs, (p.all.num_tokens - num_tokens) * p.all.num_outputs);
  float* buffer = scratch<Tokens>(size);
  const int64_t wanted = wanted_tasks(executor, p.all);
  std::vector<Product<Tokens>> products;
  std::vector<int64_t> ends;  // tasks of each product and of those before it, inner vectors first
  products.reserve(groups.size());
  for (const auto& [problem, terms] : groups) {
    products.emplace_back(executor, problem, terms, buffer, (wanted * problem.num_tokens + num_tokens - 1) / num_tokens);
    buffer += Tokens::size(problem);
    ends.push_back(num_tasks += products.back().num_tasks());
  }
  native::SerialExecutor serial;  // little work is for one thread
  parallel_for(wanted == 1 ? serial : executor, num_tasks, [&](int64_t task) {
    if (task < num_inner) return sorted->run(task);
    const int64_t i = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
    const int64_t first_task = i == 0 ? num_inner : ends[i - 1];
    for (int64_t part = 0; part < products[i].num_parts(); ++part) products[i].run(task - first_task, part);
  });
}

// Call use(tokens) with a null pointer to the type of the tokens for a format of weights and inputs.
template <typename Use>
void with_tokens(native::WeightFormat format, InputFormat inputs, const Use& use) {
  const auto words = [&](auto* tokens, auto* rounded) { inputs == InputFormat::kInt8 ? use(rounded) : use(tokens); };
  switch (format) {
    case native::WeightFormat::kFloat32: return use((PackedTokens<Floats<float>>*)nullptr);
    case native::WeightFormat::kBFloat16:
      return inputs == InputFormat::kBFloat16 ? use((RoundedTokensForBFloat16*)nullptr) : use((TokensForBFloat16*)nullptr);
    case native::WeightFormat::kFloat16: return use((PackedTokens<Floats<Float16>>*)nullptr);
    case native::WeightFormat::kFloat8: return use((PackedTokens<Float8Weights>*)nullptr);
    case native::WeightFormat::kInt8: return words((TokensForInt8*)nullptr, (DigitTokens<RoundedInt8Digits>*)nullptr);
    case native::WeightFormat::kInt4: return words((TokensForInt4*)nullptr, (DigitTokens<Int8Inputs<Int4Digits>>*)nullptr);
    case native::WeightFormat::kFloat4:
      return words((DigitTokens<Float4Digits>*)nullptr, (DigitTokens<Int8Inputs<Float4Digits>>*)nullptr);
  }
}

template <typename Tokens>
void linear_of(Executor& executor, const LinearProblem& p, Tokens*) {
  linear<Tokens>(executor, p);
}

template <typename Tokens>
void grouped_linear_of(Executor& executor, const GroupedProblem& p, Tokens*) {
  grouped_linear<Tokens>(executor, p);
}

#ifdef NATIVE_PLAIN
// Float arithmetic is the same without products of bytes.
template <typename Format>
void linear_of(Executor& executor, const LinearProblem& p, PackedTokens<Format>*) {
  native::NATIVE_PLAIN::kernels.linear(executor, p);
}

template <typename Format>
void grouped_linear_of(Executor& executor, const GroupedProblem& p, PackedTokens<Format>*) {
  native::NATIVE_PLAIN::kernels.grouped_linear(executor, p);
}
#endif

#if defined(NATIVE_PLAIN) && defined(NATIVE_AMX_DIGITS)
// Words meet tiles only with many tokens; the results are those of vectors.
template <typename Format>
void linear_of(Executor& executor, const LinearProblem& p, DigitTokens<Format>*) {
  if (p.num_tokens >= kFewestTileDigits) return linear<TileDigits<Format>>(executor, p);
  native::NATIVE_PLAIN::kernels.linear(executor, p);
}

template <typename Format>
void grouped_linear_of(Executor& executor, const GroupedProblem& p, DigitTokens<Format>*) {
  native::NATIVE_PLAIN::kernels.grouped_linear(executor, p);
}
#endif

// Multiply a tile of tokens with a matrix of floats. Vectors even where matrix tiles exist: a token's sums must not depend
// on the number of tokens.
#ifdef NATIVE_PLAIN
inline void float_tile(const LinearProblem& p) { native::NATIVE_PLAIN::kernels.float_tile(p); }
#else
template <typename Number>
void float_tile_of(const LinearProblem& p) {
  native::SerialExecutor serial;
  struct Tile;  // not the buffer of a product with the same format, whose task this may be
  const PackedTokens<Floats<Number>> tokens(serial, p, scratch<Tile>(PackedTokens<Floats<Number>>::size(p)));
  multiply_panels(p, tokens, 0, num_panels(p));
}

inline void float_tile(const LinearProblem& p) {
  switch (p.format) {
    case native::WeightFormat::kBFloat16: return float_tile_of<BFloat16>(p);
    case native::WeightFormat::kFloat16: return float_tile_of<Float16>(p);
    default: return float_tile_of<float>(p);
  }
}
#endif

inline void linear_of_any_format(Executor& executor, const LinearProblem& p) {
  with_tokens(p.format, p.input_format, [&](auto* tokens) { linear_of(executor, p, tokens); });
}

inline void grouped_linear_of_any_format(Executor& executor, const GroupedProblem& p) {
  with_tokens(p.all.format, p.all.input_format, [&](auto* tokens) { grouped_linear_of(executor, p, tokens); });
}

}  // namespace NATIVE_ISA
