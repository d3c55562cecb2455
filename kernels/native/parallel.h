// How many threads a piece of work is worth.
#pragma once

#include <cstdint>

namespace kvhive {

// Elements that one thread passes over in about the time that waking a second one takes.
constexpr int64_t WORTH_A_THREAD = 32768;

inline int threads_for(int64_t elements, int64_t threads) {
  int64_t useful = elements / WORTH_A_THREAD;
  return int(useful < 1 ? 1 : useful < threads ? useful : threads);
}

// Call work(i) for all i below `count`. One thread alone forms no team, which would cost more than little work.
template <typename F>
inline void for_each(int64_t count, int threads, F work) {
  if (threads <= 1) {
    for (int64_t i = 0; i < count; i++) work(i);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; i++) work(i);
}

}  // namespace kvhive

// What the library exports; everything else is hidden.
#define KVHIVE_EXPORT extern "C" __attribute__((visibility("default")))

// Numbers of the dtypes in calls from Python (library.py).
constexpr int64_t FLOAT32 = 0;
constexpr int64_t BFLOAT16 = 1;
constexpr int64_t FLOAT64 = 2;
