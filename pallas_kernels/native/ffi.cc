// XLA FFI handlers of the kernels: typed, with checked shapes, for the best instruction set of this processor.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#if defined(NATIVE_HAS_avxvnni) || defined(NATIVE_HAS_amx)
#include <cpuid.h>
#endif
#ifdef NATIVE_HAS_amx
#include <sys/syscall.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif
#ifdef NATIVE_HAS_neondot
#include <sys/auxv.h>
#endif

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

class XlaThreads final : public native::Executor {
 public:
  explicit XlaThreads(ffi::ThreadPool& pool) : pool_(pool) {}
  int64_t num_threads() const override { return pool_.num_threads(); }
  void schedule(void (*run)(void*), void* data) override {
    pool_.Schedule([run, data] { run(data); });
  }

 private:
  ffi::ThreadPool& pool_;
};

struct InstructionSet {
  const char* name;
  const native::Kernels* kernels;
};

#ifdef NATIVE_HAS_avxvnni
bool has_avxvnni() {  // __builtin_cpu_supports of some compilers does not know the name
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}
#endif

#ifdef NATIVE_HAS_amx
// Return whether the processor has tiles of bfloat16 and bytes and the system lets this process use them.
bool has_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  unsigned a, b, c, d;
  const bool has_tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 && d >> 24 & 1 && d >> 25 & 1;
  return has_tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// Return the instruction sets that this processor and the library have, best first.
const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = [] {
    std::vector<InstructionSet> found;
#ifdef __x86_64__
    [[maybe_unused]] const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    [[maybe_unused]] const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
#ifdef NATIVE_HAS_amx
    if (has_avx512 && __builtin_cpu_supports("avx512vnni") && has_amx()) found.push_back({"amx", &native::amx::kernels});
#endif
#ifdef NATIVE_HAS_avx512vnni
    if (has_avx512 && __builtin_cpu_supports("avx512vnni")) found.push_back({"avx512vnni", &native::avx512vnni::kernels});
#endif
#ifdef NATIVE_HAS_avx512
    if (has_avx512) found.push_back({"avx512", &native::avx512::kernels});
#endif
#ifdef NATIVE_HAS_avxvnni
    if (has_avx2 && has_avxvnni()) found.push_back({"avxvnni", &native::avxvnni::kernels});
#endif
#ifdef NATIVE_HAS_avx2
    if (has_avx2) found.push_back({"avx2", &native::avx2::kernels});
#endif
#ifdef NATIVE_HAS_neondot
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found.push_back({"neondot", &native::neondot::kernels});
#endif
    found.push_back({"generic", &native::generic::kernels});
    return found;
  }();
  return sets;
}

std::atomic<const native::Kernels*>& kernels_in_use() {
  static std::atomic<const native::Kernels*> kernels{instruction_sets().front().kernels};
  return kernels;
}

const native::Kernels& kernels() { return *kernels_in_use().load(std::memory_order_relaxed); }

// Return whether an optional operand, which is empty if left out, has another size.
bool misfits(const ffi::Buffer<ffi::F32>& optional, int64_t size) {
  return optional.element_count() > 0 && static_cast<int64_t>(optional.element_count()) != size;
}

const float* data_or_null(const ffi::Buffer<ffi::F32>& optional) {
  return optional.element_count() > 0 ? optional.typed_data() : nullptr;
}

// Return activations, or none for an operand that is left out and empty.
template <typename Buffer>
native::Activations activations(const Buffer& buffer) {
  if (buffer.element_count() == 0) return {nullptr, false};
  return {buffer.untyped_data(), buffer.element_type() == ffi::BF16};
}

bool are_activations(const ffi::AnyBuffer& buffer) {
  return buffer.element_type() == ffi::F32 || buffer.element_type() == ffi::BF16;
}

// Set `size` activations from an element on to zero.
void clear(const native::Activations& to, int64_t element, int64_t size) {
  std::memset(to.from(element).data, 0, size * (to.is_bfloat16 ? 2 : 4));
}

constexpr int64_t kMaxInt8Columns = 1 << 16;  // of a group: their products of bytes fit an int32

// Formats of packed weights, in the order of packed_linear's WEIGHT_DTYPES, and the columns in an element of their arrays.
struct StoredFormat {
  native::WeightFormat format;
  ffi::DataType dtype;
  int64_t columns;
};
constexpr StoredFormat kStoredFormats[] = {
    {native::WeightFormat::kFloat32, ffi::F32, 1},     {native::WeightFormat::kBFloat16, ffi::BF16, 1},
    {native::WeightFormat::kFloat16, ffi::F16, 1},     {native::WeightFormat::kInt8, ffi::S32, 4},
    {native::WeightFormat::kInt4, ffi::U32, 8},        {native::WeightFormat::kFloat8, ffi::F8E4M3FN, 1},
    {native::WeightFormat::kFloat4, ffi::U32, 8},
};

// Return the format of a pool by the dtype of its array, or kInt4 for unsigned bytes.
std::optional<native::PoolFormat> pool_format(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F32: return native::PoolFormat::kFloat32;
    case ffi::BF16: return native::PoolFormat::kBFloat16;
    case ffi::S8: return native::PoolFormat::kInt8;
    case ffi::F8E4M3FN: return native::PoolFormat::kFloat8;
    case ffi::U8: return native::PoolFormat::kInt4;
    default: return std::nullopt;
  }
}

// Fill `p` with the product of x with each of `num_matrices` matrices, of which `p.weight` is the first.
ffi::Error read_product(int64_t weight_format, int64_t input_format, const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight,
                        const ffi::Buffer<ffi::F32>& scales, const ffi::Buffer<ffi::F32>& zeros, int64_t num_matrices,
                        ffi::Result<ffi::AnyBuffer> y, native::LinearProblem& p) {
  if (!are_activations(x) || !are_activations(*y)) return ffi::Error::InvalidArgument("x and y must be float32 or bfloat16");
  const auto w = weight.dimensions(), s = scales.dimensions();  // [panels, K, parts, rows], [panels, groups, ...]
  const auto dims = x.dimensions(), out = y->dimensions();
  if (w.size() != 4 || s.size() != 4 || dims.size() != 2 || out.size() != 2 || w[2] < 1 || w[2] > 2 ||
      w[2] * w[3] != native::kPanelRows || num_matrices < 1 || w[0] % num_matrices != 0 ||
      out[1] > w[0] / num_matrices * w[3] || out[1] <= (w[0] / num_matrices - 1) * w[3] || out[0] != dims[0]) {
    return ffi::Error::InvalidArgument("x [T, K] and panels [N / 16, K, 1, 16] or [N / 8, K, 2, 8] must give y [T, N]");
  }
  const StoredFormat* stored = std::find_if(std::begin(kStoredFormats), std::end(kStoredFormats), [&](const auto& each) {
    return static_cast<int64_t>(each.format) == weight_format;
  });
  if (stored == std::end(kStoredFormats) || stored->dtype != weight.element_type()) {
    return ffi::Error::InvalidArgument(
        "weights must be float32, bfloat16, float16 or float8_e4m3fn, int8 in words of int32, or 4 bits in words of uint32");
  }
  const native::WeightFormat format = stored->format;
  const bool is_words = stored->columns > 1, is_grouped = is_words || format == native::WeightFormat::kFloat8;
  const int64_t T = dims[0], K = dims[1], N = out[1], num_groups = is_grouped ? s[1] : 1;
  if (is_grouped && (s[0] != w[0] || s[2] != w[2] || s[3] != w[3] || num_groups < 1 || K % num_groups != 0)) {
    return ffi::Error::InvalidArgument("weights of 8 and 4 bits need scales as they are packed, of groups dividing K");
  }
  const int64_t group_size = K / num_groups;
  if (w[1] != num_groups * ((group_size + stored->columns - 1) / stored->columns)) {
    return ffi::Error::InvalidArgument("packed weights must have K columns as x has, or the words of each group");
  }
  const bool is_integer = is_words && format != native::WeightFormat::kFloat4;
  if (misfits(zeros, is_integer ? static_cast<int64_t>(scales.element_count()) : 0)) {
    return ffi::Error::InvalidArgument("zero points must be shaped as scales, for integer weights");
  }
  p.input_format = static_cast<native::InputFormat>(input_format);
  if (!(input_format == 0 || (p.input_format == native::InputFormat::kInt8 && is_words && group_size <= kMaxInt8Columns) ||
        (p.input_format == native::InputFormat::kFloat8 && format == native::WeightFormat::kFloat8) ||
        (p.input_format == native::InputFormat::kBFloat16 && format == native::WeightFormat::kBFloat16))) {
    return ffi::Error::InvalidArgument(
        "inputs must be floats, int8 for integers and fp4 in groups of up to 65536 columns, or fp8 or bfloat16 for such weights");
  }
  p.x = activations(x);
  p.weight = weight.untyped_data();
  p.y = activations(*y);
  p.num_tokens = T;
  p.num_inputs = K;
  p.num_outputs = N;
  p.gated = w[2] == 2;
  p.format = format;
  p.scales = data_or_null(scales);
  p.zeros = data_or_null(zeros);
  p.group_size = group_size;
  return ffi::Error::Success();
}

constexpr size_t kTermOperands = 7;

// Fill `p.terms` from the last operands: slots, a, b, part_ends, and shift, factor and x, which are empty if left out.
// There are none in calls without terms, and null is left if no token has any. A grouped product has `num_groups`
// matrices for each slot, and no shift and factor.
ffi::Error read_terms(const ffi::RemainingArgs& operands, int64_t num_groups, const ffi::AnyBuffer& weight,
                      native::LinearProblem& p, native::Terms& terms) {
  if (operands.size() == 0) return ffi::Error::Success();
  const auto slots = operands.get<ffi::Buffer<ffi::S32>>(0), part_ends = operands.get<ffi::Buffer<ffi::S32>>(3);
  const auto a = operands.get<ffi::AnyBuffer>(1), b = operands.get<ffi::AnyBuffer>(2);
  const auto shift = operands.get<ffi::Buffer<ffi::F32>>(4), factor = operands.get<ffi::Buffer<ffi::F32>>(5);
  const auto x = operands.get<ffi::Buffer<ffi::F32>>(6);
  if (operands.size() != kTermOperands || !slots || !a || !b || !part_ends || !shift || !factor || !x) {
    return ffi::Error::InvalidArgument("terms must be slots, a, b, part_ends, shift, factor and x");
  }
  const auto a_dims = a->dimensions(), b_dims = b->dimensions();
  const int64_t num_panels = weight.dimensions()[0];  // of all groups
  const auto num_elements = [](const auto& buffer) { return static_cast<int64_t>(buffer.element_count()); };
  terms.num_parts = num_elements(*part_ends);
  if (a_dims.size() != 4 || b_dims.size() != 4 || a_dims[2] * a_dims[3] != native::kPanelRows ||
      b_dims[2] * b_dims[3] != native::kPanelRows || terms.num_parts < 1 || b_dims[0] == 0 || b_dims[0] % num_panels != 0 ||
      b_dims[1] == 0 || b_dims[1] % native::kPanelRows != 0 ||
      a_dims[0] != b_dims[0] / num_panels * num_groups * terms.num_parts * b_dims[1] / native::kPanelRows ||
      num_elements(*slots) != static_cast<int64_t>(p.num_tokens)) {
    return ffi::Error::InvalidArgument("terms must have a [S, parts * rank, K] and b [S, N, rank] in panels, and a slot per token");
  }
  terms.num_slots = b_dims[0] / num_panels;
  terms.rank = b_dims[1];
  terms.num_inputs = a_dims[1];
  terms.gated = b_dims[2] == 2;
  terms.part_ends = part_ends->typed_data();
  const int64_t num_rows = terms.part_ends[terms.num_parts - 1], num_vectors = terms.num_slots * num_rows;
  if (misfits(*shift, num_groups == 1 ? num_vectors : 0) || misfits(*factor, num_groups == 1 ? num_vectors : 0) ||
      misfits(*x, p.num_tokens * terms.num_inputs) || (num_elements(*x) == 0 && terms.num_inputs != p.num_inputs)) {
    return ffi::Error::InvalidArgument("terms must have shift and factor [S, N], and as many inputs as a has columns");
  }
  const auto dtype = a->element_type();
  if (dtype != b->element_type() || (dtype != ffi::F32 && dtype != ffi::BF16 && dtype != ffi::F16)) {
    return ffi::Error::InvalidArgument("terms must have a and b in one of float32, bfloat16 and float16");
  }
  terms.format = dtype == ffi::F32    ? native::WeightFormat::kFloat32
                 : dtype == ffi::BF16 ? native::WeightFormat::kBFloat16
                                      : native::WeightFormat::kFloat16;
  terms.slots = slots->typed_data();
  terms.a = a->untyped_data();
  terms.b = b->untyped_data();
  terms.shift = data_or_null(*shift);
  terms.factor = data_or_null(*factor);
  terms.x = data_or_null(*x);
  bool has_terms = false;
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    if (terms.slots[t] < 0 || terms.slots[t] > terms.num_slots) {
      return ffi::Error::InvalidArgument("slots must be 0 or numbers of adapters");
    }
    has_terms |= terms.slots[t] > 0;
  }
  p.terms = has_terms ? &terms : nullptr;
  return ffi::Error::Success();
}

// `scales`, `zeros`, `norm`, `bias`, `residual` and `num_live` are empty if left out. Only the first `num_live` tokens
// are computed; results of the others are zero.
ffi::Error run_linear(ffi::ThreadPool pool, float eps, int64_t weight_format, int64_t input_format, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                      ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::F32> zeros, ffi::Buffer<ffi::F32> norm,
                      ffi::Buffer<ffi::F32> bias, ffi::AnyBuffer residual, ffi::Buffer<ffi::S32> num_live,
                      ffi::RemainingArgs of_terms, ffi::Result<ffi::AnyBuffer> y) {
  native::LinearProblem p{};
  native::Terms terms{};
  if (ffi::Error error = read_product(weight_format, input_format, x, weight, scales, zeros, 1, y, p); error.failure()) return error;
  if (misfits(norm, p.num_inputs) || misfits(bias, (p.gated ? 2 : 1) * p.num_outputs) ||
      (residual.element_count() > 0 &&
       (!are_activations(residual) || static_cast<int64_t>(residual.element_count()) != p.num_tokens * p.num_outputs))) {
    return ffi::Error::InvalidArgument(
        "a norm must be [K], a bias [N] or gated [2N], a residual [T, N] in float32 or bfloat16");
  }
  p.norm = data_or_null(norm);
  p.eps = eps;
  p.bias = data_or_null(bias);
  p.residual = activations(residual);
  if (ffi::Error error = read_terms(of_terms, 1, weight, p, terms); error.failure()) return error;
  if (num_live.element_count() > 0) {
    const int64_t live = std::clamp<int64_t>(*num_live.typed_data(), 0, p.num_tokens);
    clear(p.y, live * p.num_outputs, (p.num_tokens - live) * p.num_outputs);
    p.num_tokens = live;
  }
  if (p.num_tokens == 0) return ffi::Error::Success();
  XlaThreads threads(pool);
  kernels().linear(threads, p);
  return ffi::Error::Success();
}

// `scales` and `zeros` are empty if left out.
ffi::Error run_grouped_linear(ffi::ThreadPool pool, int64_t weight_format, int64_t input_format, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                              ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::F32> zeros,
                              ffi::Buffer<ffi::S32> group_sizes, ffi::RemainingArgs of_terms,
                              ffi::Result<ffi::AnyBuffer> y) {
  native::GroupedProblem p{};
  native::Terms terms{};
  p.num_groups = static_cast<int64_t>(group_sizes.element_count());
  p.group_sizes = group_sizes.typed_data();
  if (ffi::Error error = read_product(weight_format, input_format, x, weight, scales, zeros, p.num_groups, y, p.all);
      error.failure()) {
    return error;
  }
  int64_t num_tokens = 0;
  for (int64_t g = 0; g < p.num_groups; ++g) {
    if (p.group_sizes[g] < 0) return ffi::Error::InvalidArgument("sizes of groups must not be negative");
    num_tokens += p.group_sizes[g];
  }
  if (num_tokens > p.all.num_tokens) {
    return ffi::Error::InvalidArgument("groups must have no more tokens than x has rows");
  }
  if (ffi::Error error = read_terms(of_terms, p.num_groups, weight, p.all, terms); error.failure()) return error;
  XlaThreads threads(pool);
  kernels().grouped_linear(threads, p);
  return ffi::Error::Success();
}

// `scales`, `table_row`, `sinks` and `rope` are empty if left out; `tree_mask` is an operand only of calls with trees,
// `updated_scales` a result only of those with scales. `rank` is the size of the values in latents, 0 for keys and values
// of heads. Rows of more than `max_queries` new tokens are only written, unless it is 0; if it is -1, only each row's last new token attends. A page of a pool for other heads is as many pages of these heads as it has room for.
ffi::Error run_attention(ffi::ThreadPool pool, float scale, float soft_cap, int64_t window, int64_t rank,
                         int64_t max_queries, ffi::AnyBuffer qkv,
                         ffi::AnyBuffer kv_pages, ffi::Buffer<ffi::BF16> scales, ffi::Buffer<ffi::S32> layer,
                         ffi::Buffer<ffi::S32> kv_lens,
                         ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> table_row,
                         ffi::Buffer<ffi::S32> cu_q_lens,
                         ffi::Buffer<ffi::S32> num_rows, ffi::Buffer<ffi::F32> sinks, ffi::Buffer<ffi::F32> rope,
                         ffi::RemainingArgs tree_mask, ffi::Result<ffi::AnyBuffer> out,
                         ffi::Result<ffi::AnyBuffer> updated, ffi::RemainingRets updated_scales) {
  if (updated->untyped_data() != kv_pages.untyped_data()) {
    return ffi::Error::InvalidArgument("the pool must be updated in place; donate it to the jitted function");
  }
  if (!are_activations(qkv) || !are_activations(*out)) {
    return ffi::Error::InvalidArgument("qkv and out must be float32 or bfloat16");
  }
  const auto pages = kv_pages.dimensions();  // [L, N, 2K, P, H] or [L, N, P, H]
  const auto heads = qkv.dimensions(), of_q = out->dimensions();
  const auto format = pool_format(kv_pages.element_type());
  if (!format.has_value()) {
    return ffi::Error::InvalidArgument("the pool must be float32, bfloat16, int8, float8_e4m3fn, or uint8 for int4");
  }
  if (rank > 0) {
    if (*format == native::PoolFormat::kInt8 || *format == native::PoolFormat::kInt4) {
      return ffi::Error::InvalidArgument("the pool of latents must be float32, bfloat16 or float8_e4m3fn");
    }
    if (pages.size() != 4 || heads.size() != 3 || of_q.size() != 3 || of_q[0] != heads[0] || of_q[2] != rank ||
        rank > heads[2] || pages[3] != heads[2] || heads[1] != of_q[1] + 1) {
      return ffi::Error::InvalidArgument("q and latents [T, Q + 1, W] must fit the pool [L, N, P, W] and give [T, Q, r]");
    }
  }
  int64_t num_vectors_of_token = 0, num_parts = 1;  // keys and values; pages of these heads in one of the pool
  if (rank == 0) {
    const bool has_shapes = pages.size() == 5 && heads.size() == 3 && of_q.size() == 3 && of_q[0] == heads[0] &&
        of_q[2] == heads[2] && pages[2] >= 2;
    num_vectors_of_token = has_shapes ? heads[1] - of_q[1] : 0;
    const bool has_heads = num_vectors_of_token >= 2 && num_vectors_of_token % 2 == 0 &&
        of_q[1] % (num_vectors_of_token / 2) == 0;
    const int64_t token_size = has_heads ? num_vectors_of_token * native::stored_size(*format, heads[2]) : 0;
    const bool is_own = has_heads && pages[2] == num_vectors_of_token && pages[2] * pages[4] == token_size;
    const bool is_float = *format == native::PoolFormat::kFloat32 || *format == native::PoolFormat::kBFloat16;
    if (!is_own && !(has_heads && is_float && pages[2] * pages[4] % token_size == 0)) {
      return ffi::Error::InvalidArgument(
          "qkv [T, Q + 2K, H] must fit the pool [L, N, 2K, P, H], or a part of its pages of floats, and give out [T, Q, H]");
    }
    num_parts = pages[2] * pages[4] / token_size;
  }
  const bool has_scales = *format == native::PoolFormat::kInt8 || *format == native::PoolFormat::kFloat8;
  const int64_t num_vectors = pages[0] * pages[1] * pages[2] * (rank > 0 ? 1 : pages[3]);
  if (static_cast<int64_t>(scales.element_count()) != (has_scales ? num_vectors : 0)) {
    return ffi::Error::InvalidArgument("scales must be [L, N, 2K, P], of latents [L, N, P], in int8 and fp8 pools only");
  }
  if (has_scales) {
    auto target = updated_scales.get<ffi::Buffer<ffi::BF16>>(0);
    if (!target.has_value() || (*target)->untyped_data() != scales.untyped_data()) {
      return ffi::Error::InvalidArgument("scales must be updated in place; donate them to the jitted function");
    }
  }
  const auto angles = rope.dimensions();
  if (rope.element_count() > 0 &&
      (angles.size() != 3 || angles[0] != 2 || angles[1] != heads[0] || 2 * angles[2] != heads[2] - rank)) {
    return ffi::Error::InvalidArgument("rope must be [2, T, H / 2], of latents [2, T, (W - r) / 2]");
  }
  const auto tables = page_table.dimensions();
  const int64_t num_padded = static_cast<int64_t>(kv_lens.element_count());
  if (tables.size() != 2 ||
      static_cast<int64_t>(table_row.element_count()) != (table_row.element_count() > 0 ? num_padded : 0) ||
      (table_row.element_count() == 0 && tables[0] != num_padded)) {
    return ffi::Error::InvalidArgument("the page table must be [R, M], or have any rows and table_row be [R]");
  }
  native::AttentionProblem p{};
  p.qkv = activations(qkv);
  p.rope = rope.element_count() > 0 ? rope.typed_data() : nullptr;
  p.pool = kv_pages.untyped_data();
  p.format = *format;
  p.scales = scales.untyped_data();
  p.kv_lens = kv_lens.typed_data();
  p.page_table = page_table.typed_data();
  p.table_row = table_row.element_count() > 0 ? table_row.typed_data() : nullptr;
  p.cu_q_lens = cu_q_lens.typed_data();
  p.sinks = data_or_null(sinks);
  if (tree_mask.size() > 0) {
    const auto words = tree_mask.get<ffi::Buffer<ffi::S32>>(0);
    if (!words.has_value() || static_cast<int64_t>(words->element_count()) != heads[0]) {
      return ffi::Error::InvalidArgument("tree_mask must be int32 [T]");
    }
    p.tree_mask = words->typed_data();
  }
  p.out = activations(*out);
  p.num_tokens = heads[0];
  p.num_query_heads = of_q[1];
  p.has_latents = rank > 0;
  p.num_kv_heads = rank > 0 ? 1 : num_vectors_of_token / 2;
  p.head_dim = heads[2];
  p.value_dim = rank > 0 ? rank : heads[2];
  p.num_rows = *num_rows.typed_data();
  p.table_width = tables[1];
  p.layer = *layer.typed_data();
  p.num_pages = pages[1] * num_parts;
  p.page_size = pages[rank > 0 ? 2 : 3];
  p.scale = scale;
  p.soft_cap = soft_cap;
  p.window = window;
  p.max_queries = max_queries;
  XlaThreads threads(pool);
  kernels().attention(threads, p);
  return ffi::Error::Success();
}

constexpr size_t kMinLazyBytes = size_t{64} << 20;  // allocators map such arrays by themselves: no other memory is near
constexpr size_t kSliceBytes = size_t{8} << 20;

#ifdef __linux__
// Let the system provide memory in the background, so that no step waits for it. Memory that is unmapped meanwhile ends
// this, as do systems that cannot.
void populate(char* data, size_t num_bytes) {
#ifdef MADV_POPULATE_WRITE
  const auto provide = [=] {
    for (size_t i = 0; i < num_bytes; i += kSliceBytes) {
      if (madvise(data + i, std::min(kSliceBytes, num_bytes - i), MADV_POPULATE_WRITE) != 0) return;
    }
  };
  try {
    std::thread(provide).detach();
  } catch (const std::system_error&) {  // no threads are left: steps have the memory provided
  }
#endif
}
#endif

// Fill an array with zeros. Linux drops the pages of a large one and provides zeros later; other systems, and memory that
// is locked or shared, have them written.
void fill_with_zeros(void* data, size_t num_bytes) {
  char* begin = static_cast<char*>(data);
#ifdef __linux__
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const size_t head = (page - address % page) % page, tail = (address + num_bytes) % page;
  if (num_bytes >= kMinLazyBytes) {
    char* first = begin + head;
    const size_t whole = num_bytes - head - tail;
    if (madvise(first, whole, MADV_DONTNEED) == 0) {
      madvise(first, whole, MADV_HUGEPAGE);  // fewer faults; systems without huge pages refuse it
      std::memset(begin, 0, head);
      std::memset(first + whole, 0, tail);
      populate(first, whole);
      return;
    }
  }
#endif
  std::memset(begin, 0, num_bytes);
}

ffi::Error run_zeros(ffi::Result<ffi::AnyBuffer> out) {
  fill_with_zeros(out->untyped_data(), out->size_bytes());
  return ffi::Error::Success();
}

}  // namespace

// Version of the calls' signatures and of packed weights; pallas_kernels/native/__init__.py has the same number.
extern "C" int jaxserve_native_abi() { return 19; }

// Return the index-th of the usable instruction sets, best first; null past the last.
extern "C" const char* jaxserve_native_instruction_set(int index) {
  const auto& sets = instruction_sets();
  return index < static_cast<int>(sets.size()) ? sets[index].name : nullptr;
}

// Make all later calls use one instruction set, so that tests reach those that are not the best.
extern "C" void jaxserve_native_use(int index) { kernels_in_use() = instruction_sets().at(index).kernels; }

// out[T, Q, H] = attention of each token to those of its span, before and after it. Spans follow each other, and tokens
// from the first empty one on have no outputs. Keys and values are arranged in pages of a temporary pool.
ffi::Error run_span_attention(ffi::ThreadPool pool, float scale, ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32> rope,
                              ffi::Buffer<ffi::S32> spans, ffi::ResultBuffer<ffi::F32> out) {
  constexpr int64_t kPageTokens = 64;
  const auto heads = qkv.dimensions(), of_q = out->dimensions(), bounds = spans.dimensions(), angles = rope.dimensions();
  if (heads.size() != 3 || of_q.size() != 3 || of_q[0] != heads[0] || of_q[2] != heads[2] || heads[1] != 3 * of_q[1] ||
      bounds.size() != 2 || bounds[0] != 2 || bounds[1] != heads[0]) {
    return ffi::Error::InvalidArgument("qkv [T, 3Q, H] and spans [2, T] must give out [T, Q, H]");
  }
  if (rope.element_count() > 0 &&
      (angles.size() != 3 || angles[0] != 2 || angles[1] != heads[0] || 2 * angles[2] != heads[2])) {
    return ffi::Error::InvalidArgument("rope must be [2, T, H / 2]");
  }
  const int64_t num_tokens = heads[0];
  const int32_t *firsts = spans.typed_data(), *ends = firsts + num_tokens;
  std::vector<int32_t> lengths, starts = {0};
  int64_t num_pages = 0, table_width = 1;
  for (int32_t start = 0; start < num_tokens && ends[start] > start; start = ends[start]) {
    if (firsts[start] != start || ends[start] > num_tokens) {
      return ffi::Error::InvalidArgument("each span must begin where the one before it ends");
    }
    lengths.push_back(ends[start] - start);
    starts.push_back(ends[start]);
    const int64_t pages = (lengths.back() + kPageTokens - 1) / kPageTokens;
    num_pages += pages;
    table_width = std::max(table_width, pages);
  }
  const int64_t num_rows = static_cast<int64_t>(lengths.size());
  std::vector<int32_t> table(std::max<int64_t>(num_rows, 1) * table_width, 0);
  for (int64_t row = 0, page = 0; row < num_rows; ++row) {
    for (int64_t i = 0; i * kPageTokens < lengths[row]; ++i) table[row * table_width + i] = static_cast<int32_t>(page++);
  }
  const int64_t pool_size = num_pages * of_q[1] * 2 * kPageTokens * heads[2];
  std::unique_ptr<float[]> keys_and_values(new float[pool_size]);  // not set: tokens are written before they are read
  native::AttentionProblem p{};
  p.qkv = activations(qkv);
  p.rope = rope.element_count() > 0 ? rope.typed_data() : nullptr;
  p.pool = keys_and_values.get();
  p.format = native::PoolFormat::kFloat32;
  p.kv_lens = lengths.data();
  p.page_table = table.data();
  p.cu_q_lens = starts.data();
  p.out = activations(*out);
  p.num_tokens = num_tokens;
  p.num_query_heads = p.num_kv_heads = of_q[1];
  p.head_dim = p.value_dim = heads[2];
  p.num_rows = num_rows;
  p.table_width = table_width;
  p.num_pages = num_pages;
  p.page_size = kPageTokens;
  p.scale = scale;
  p.sees_all = true;
  XlaThreads threads(pool);
  kernels().attention(threads, p);
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_span_attention, run_span_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("scale")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_attention, run_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("rank")
                                  .Attr<int64_t>("max_queries")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_linear, run_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("eps")
                                  .Attr<int64_t>("weight_format")
                                  .Attr<int64_t>("input_format")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_grouped_linear, run_grouped_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("weight_format")
                                  .Attr<int64_t>("input_format")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_zeros, run_zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
