// The kernels for one instruction set; the build defines its name, NATIVE_ISA, and the floats per vector, NATIVE_WIDTH.
// With an extension that multiplies bytes or tiles, kernels that do neither, such as attention, are those of
// NATIVE_PLAIN, the set without. The build names this one too, as the baseline of a compiler may have the extension.

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
