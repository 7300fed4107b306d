// Loops over independent tasks on XLA's own threads, so that kernels and XLA never compete for cores.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace native {

// Runs functions on other threads: XLA's pool when serving, none in a single-threaded test.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual int64_t num_threads() const = 0;
  // Run run(data) on another thread at some later time.
  virtual void schedule(void (*run)(void*), void* data) = 0;
};

// Runs nothing: loops are the caller's.
class SerialExecutor : public Executor {
 public:
  int64_t num_threads() const override { return 1; }
  void schedule(void (*)(void*), void*) override {}
};

// State shared by the threads of one loop. It outlives the loop: a helper may start when all tasks are done already.
struct Loop {
  void (*body)(const void* context, int64_t task);
  const void* context;  // on the caller's stack: read only while a task is left
  int64_t num_tasks;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> num_done{0};

  void work() {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
      body(context, task);
      num_done.fetch_add(1, std::memory_order_release);
    }
  }

  void wait() const {
    for (int spins = 0; num_done.load(std::memory_order_acquire) < num_tasks; ++spins) {
      if (spins > 4096) std::this_thread::yield();  // a helper lost its core in the middle of a task
    }
  }
};

// Call body(task) for every task in [0, num_tasks). The caller works too and waits only for tasks in progress, so it
// may itself be one of the executor's threads.
template <typename Body>
void parallel_for(Executor& executor, int64_t num_tasks, const Body& body) {
  const int64_t num_helpers = std::min(executor.num_threads(), num_tasks) - 1;
  if (num_helpers <= 0) {
    for (int64_t task = 0; task < num_tasks; ++task) body(task);
    return;
  }
  auto loop = std::make_shared<Loop>();
  loop->body = [](const void* context, int64_t task) { (*static_cast<const Body*>(context))(task); };
  loop->context = &body;
  loop->num_tasks = num_tasks;
  for (int64_t i = 0; i < num_helpers; ++i) {
    executor.schedule(
        [](void* data) {
          std::unique_ptr<std::shared_ptr<Loop>> own(static_cast<std::shared_ptr<Loop>*>(data));
          (*own)->work();
        },
        new std::shared_ptr<Loop>(loop));
  }
  loop->work();
  loop->wait();
}

}  // namespace native
