// The kernels for one instruction set; the build defines its name, NATIVE_ISA, and the floats per vector, NATIVE_WIDTH.
// With an extension that multiplies bytes or tiles, kernels that do neither, such as attention, are those of
// NATIVE_PLAIN, the set without. The build names this one too, as the baseline of a compiler may have the extension.

#include "linear.h"

#if !defined(NATIVE_PLAIN) || defined(NATIVE_AMX)
#include "attention.h"
#endif

namespace native {
namespace NATIVE_ISA {

#ifdef NATIVE_PLAIN
static void attention(Executor& executor, const AttentionProblem& p) {
#ifdef NATIVE_AMX
  if (::NATIVE_ISA::fits_tiles(p)) return ::NATIVE_ISA::attention_by_tiles(executor, p);
#endif
  NATIVE_PLAIN::kernels.attention(executor, p);
}
#else
using ::NATIVE_ISA::attention;
#endif

const Kernels kernels = {::NATIVE_ISA::float_tile, ::NATIVE_ISA::linear_of_any_format, ::NATIVE_ISA::grouped_linear_of_any_format, attention};

}  // namespace NATIVE_ISA
}  // namespace native
