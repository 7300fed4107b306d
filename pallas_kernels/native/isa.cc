// The kernels for one instruction set; the build defines its name, NATIVE_ISA, and the floats per vector, NATIVE_WIDTH.

#include "linear.h"

#ifndef __AVX512VNNI__
#include "attention.h"
#endif

namespace native {
namespace NATIVE_ISA {

#ifdef __AVX512VNNI__
// Attention multiplies no bytes: it is that of plain AVX-512.
static void attention(Executor& executor, const AttentionProblem& p) { avx512::kernels.attention(executor, p); }
#else
using ::NATIVE_ISA::attention;
#endif

const Kernels kernels = {::NATIVE_ISA::linear_of_any_format, ::NATIVE_ISA::grouped_linear_of_any_format, attention};

}  // namespace NATIVE_ISA
}  // namespace native
