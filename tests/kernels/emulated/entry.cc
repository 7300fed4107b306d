// A program of the kernels alone, for a processor that is emulated: it waits for problems and solves them on its thread.

#include "kernels.h"

namespace {

class OneThread : public native::Executor {
 public:
  int64_t num_threads() const override { return 1; }
  void schedule(void (*run)(void*), void* data) override { run(data); }
};

// A call of one kernel; tests/kernels/emulated/calls.py has the same fields.
struct Call {
  int64_t kernel;
  const void* problem;
};

// Hand over to the emulator, which returns the next call.
const Call* next_call() {
  register long number asm("x8") = 5000;  // no system call of Linux
  register const Call* call asm("x0");
  asm volatile("svc 0" : "=r"(call) : "r"(number) : "memory");
  return call;
}

}  // namespace

int main() {
  OneThread thread;
  const native::Kernels& kernels = native::NATIVE_ISA::kernels;
  for (;;) {
    const Call& call = *next_call();
    switch (call.kernel) {
      case 0: kernels.linear(thread, *static_cast<const native::LinearProblem*>(call.problem)); break;
      case 1: kernels.grouped_linear(thread, *static_cast<const native::GroupedProblem*>(call.problem)); break;
      case 2: kernels.attention(thread, *static_cast<const native::AttentionProblem*>(call.problem)); break;
    }
  }
}
