// How many threads a piece of work is worth, and how they share it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "team.h"

namespace kvhive {

// Elements that one thread passes over in about the time that a second one needs to join.
constexpr int64_t WORTH_A_THREAD = 16384;
// Shares of a thread: enough that the others can take over what a slow one has not begun.
constexpr int64_t SHARES = 4;

inline int threads_for(int64_t elements, int64_t threads) {
  int64_t useful = elements / WORTH_A_THREAD;
  return int(useful < 1 ? 1 : useful < threads ? useful : threads);
}

// Call work(i, thread) for all i below `count`, each a piece of its own.
template <typename F>
inline void for_pieces(int64_t count, int threads, F work) {
  Team::of_process().run(count, threads, &work,
                         [](void* of, int64_t piece, int thread) { (*(F*)of)(piece, thread); });
}

// Which of `count` pieces is taken at a turn, where threads that take turns each go on with the neighbour of
// their last one: what a thread asks memory for ahead is then what it comes to, and not what another is at.
inline int64_t place_of_turn(int64_t turn, int64_t count, int threads) {
  int64_t lane = turn % threads;
  return lane * (count / threads) + std::min(lane, count % threads) + turn / threads;
}

// Call work(i) for all i below `count`, in pieces of neighbours.
template <typename F>
inline void for_each(int64_t count, int threads, F work) {
  int64_t pieces = threads <= 1 ? 1 : std::min<int64_t>(count, SHARES * threads);
  for_pieces(pieces, threads, [&](int64_t piece, int) {
    for (int64_t i = piece * count / pieces; i < (piece + 1) * count / pieces; i++) work(i);
  });
}

}  // namespace kvhive

// What the library exports; everything else is hidden.
#define KVHIVE_EXPORT extern "C" __attribute__((visibility("default")))

// Numbers of the dtypes in calls from Python (library.py).
constexpr int64_t FLOAT32 = 0;
constexpr int64_t BFLOAT16 = 1;
constexpr int64_t FLOAT64 = 2;
