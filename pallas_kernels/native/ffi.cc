// XLA's view of the kernels: typed FFI handlers, checked shapes, the best instruction set this processor has.

#include <algorithm>

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

const native::Kernels& kernels() {
#ifdef __x86_64__
  static const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx512) return native::avx512::kernels;
  if (has_avx2) return native::avx2::kernels;
#endif
  return native::generic::kernels;
}

// `norm` and `residual` are empty where there is none.
ffi::Error run_linear(ffi::ThreadPool pool, float eps, bool swiglu, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weight,
                      ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::F32> norm, ffi::Buffer<ffi::F32> residual,
                      ffi::ResultBuffer<ffi::F32> y) {
  const auto w = weight.dimensions();  // [panels, K, 16]
  native::LinearProblem p{};
  p.x = x.typed_data();
  p.weight = weight.untyped_data();
  p.y = y->typed_data();
  p.num_tokens = x.dimensions()[0];
  p.num_inputs = w[1];
  p.num_outputs = y->dimensions()[1];
  p.prologue = swiglu                      ? native::Prologue::kSwiGlu
               : norm.element_count() > 0 ? native::Prologue::kRmsNorm
                                           : native::Prologue::kNone;
  p.norm = norm.typed_data();
  p.eps = eps;
  p.residual = residual.element_count() > 0 ? residual.typed_data() : nullptr;
  switch (weight.element_type()) {
    case ffi::F32: p.format = native::WeightFormat::kFloat32; break;
    case ffi::BF16: p.format = native::WeightFormat::kBFloat16; break;
    case ffi::S8: p.format = native::WeightFormat::kInt8; break;
    default: return ffi::Error::InvalidArgument("weights must be float32, bfloat16 or int8");
  }
  p.scales = scales.typed_data();
  p.scale_block = p.num_inputs / std::max<int64_t>(1, scales.dimensions()[1]);
  XlaThreads threads(pool);
  kernels().linear(threads, p);
  return ffi::Error::Success();
}

ffi::Error run_attention(ffi::ThreadPool pool, float scale, float soft_cap, int64_t window, ffi::Buffer<ffi::F32> q,
                         ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v, ffi::AnyBuffer kv_pages,
                         ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> kv_lens, ffi::Buffer<ffi::S32> page_table,
                         ffi::Buffer<ffi::S32> cu_q_lens, ffi::Buffer<ffi::S32> num_rows, ffi::Buffer<ffi::F32> sinks,
                         ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> updated) {
  if (updated->untyped_data() != kv_pages.untyped_data()) {
    return ffi::Error::InvalidArgument("the pool must be updated in place; donate it to the jitted function");
  }
  const auto pages = kv_pages.dimensions();  // [L, N, 2K, P, H]
  native::AttentionProblem p{};
  p.q = q.typed_data();
  p.k = k.typed_data();
  p.v = v.typed_data();
  p.pool = kv_pages.untyped_data();
  p.is_bfloat16 = kv_pages.element_type() == ffi::BF16;
  p.kv_lens = kv_lens.typed_data();
  p.page_table = page_table.typed_data();
  p.cu_q_lens = cu_q_lens.typed_data();
  p.sinks = sinks.element_count() > 0 ? sinks.typed_data() : nullptr;
  p.out = out->typed_data();
  p.num_tokens = q.dimensions()[0];
  p.num_query_heads = q.dimensions()[1];
  p.head_dim = q.dimensions()[2];
  p.num_kv_heads = k.dimensions()[1];
  p.num_rows = *num_rows.typed_data();
  p.table_width = page_table.dimensions()[1];
  p.layer = *layer.typed_data();
  p.num_pages = pages[1];
  p.page_size = pages[3];
  p.scale = scale;
  p.soft_cap = soft_cap;
  p.window = window;
  XlaThreads threads(pool);
  kernels().attention(threads, p);
  return ffi::Error::Success();
}

}  // namespace

// Raised with every change of a call's arguments; pallas_kernels/native/__init__.py knows the same number.
extern "C" int jaxserve_native_abi() { return 1; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_attention, run_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_linear, run_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("swiglu")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
