// The kernels for one instruction set; the build defines its name, NATIVE_ISA, and the floats per vector, NATIVE_WIDTH.
// Attention multiplies no bytes: with an extension that does, it is that of NATIVE_PLAIN, the set without. The build
// names this one too, as the baseline of a compiler may have the extension.

#include "linear.h"

#ifndef NATIVE_PLAIN
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
