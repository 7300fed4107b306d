// The kernels for one instruction set; the build defines its name, NATIVE_ISA, and the floats per vector, NATIVE_WIDTH.

#include "linear.h"

// Attention multiplies no bytes: with the extensions that do, it is that of the plain instruction set.
#if defined(__AVX512VNNI__)
#define NATIVE_PLAIN avx512
#elif defined(__ARM_FEATURE_DOTPROD)
#define NATIVE_PLAIN generic
#else
#include "attention.h"
#endif

namespace native {
namespace NATIVE_ISA {

#ifdef NATIVE_PLAIN
static void attention(Executor& executor, const AttentionProblem& p) { NATIVE_PLAIN::kernels.attention(executor, p); }
#else
using ::NATIVE_ISA::attention;
#endif

const Kernels kernels = {::NATIVE_ISA::linear_of_any_format, ::NATIVE_ISA::grouped_linear_of_any_format, attention};

}  // namespace NATIVE_ISA
}  // namespace native
