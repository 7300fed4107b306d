// The kernels for one instruction set; the build defines its name, NATIVE_ISA, and the floats per vector, NATIVE_WIDTH.

#include "attention.h"
#include "linear.h"

namespace native {
namespace NATIVE_ISA {
const Kernels kernels = {::NATIVE_ISA::linear_of_any_format, ::NATIVE_ISA::grouped_linear_of_any_format,
                         ::NATIVE_ISA::attention};
}
}  // namespace native
