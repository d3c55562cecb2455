#include "parallel.h"

#include <pthread.h>
#include <sched.h>

#include <system_error>
#include <thread>

namespace kvhive {
namespace {

// Looks at the same place before a thread yields its core, and yields before it sleeps.
constexpr int LOOKS = 2000;
constexpr int YIELDS = 1000;

inline void look_again() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A child process has a copy of the team and none of its threads; its locks may be held by some of those.
std::atomic<bool> forked{false};

}  // namespace

Team& Team::of_process() {
  static Team* team = [] {
    pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
    return new Team;
  }();
  return *team;
}

void Team::run(int64_t count, int threads, void* of, Piece each) {
  std::unique_lock<std::mutex> turn(taken, std::defer_lock);
  if (threads <= 1 || count <= 1 || forked.load(std::memory_order_relaxed) || !turn.try_lock()) {
    for (int64_t i = 0; i < count; i++) each(of, i, 0);
    return;
  }
  grow(threads - 1);
  uint32_t now = round.load(std::memory_order_relaxed) + 1;
  // Closed first: a helper who is late for the round before and sees what is said of this one finds nothing.
  next_piece.store(uint64_t(now) << 32 | UINT32_MAX);
  work = of, piece = each;
  seats.store(threads, std::memory_order_relaxed);
  done.store(0, std::memory_order_relaxed);
  pieces.store(count, std::memory_order_release);
  next_piece.store(uint64_t(now) << 32, std::memory_order_release);
  round.store(now);
  if (sleepers.load()) {
    std::lock_guard<std::mutex> lock(asleep);
    woken.notify_all();
  }
  take_pieces(now, 0);
  for (int looks = 0; done.load(std::memory_order_acquire) < count; looks++)
    looks < LOOKS ? look_again() : (void)sched_yield();
}

void Team::grow(int wanted) {
  for (; helpers < wanted; helpers++) try {
      std::thread(&Team::help, this, helpers + 1).detach();
    } catch (const std::system_error&) {
      return;  // no more threads for this process: fewer share the work
    }
}

void Team::help(int thread) {
  for (uint32_t seen = 0; another_round(seen);) {
    seen = round.load(std::memory_order_acquire);
    if (thread < seats.load(std::memory_order_relaxed)) take_pieces(seen, thread);
  }
}

// Wait for a round other than `seen`.
bool Team::another_round(uint32_t seen) {
  for (int looks = 0; looks < LOOKS + YIELDS; looks++) {
    if (round.load(std::memory_order_acquire) != seen) return true;
    looks < LOOKS ? look_again() : (void)sched_yield();
  }
  std::unique_lock<std::mutex> lock(asleep);
  sleepers++;
  woken.wait(lock, [&] { return round.load() != seen; });
  sleepers--;
  return true;
}

void Team::take_pieces(uint32_t of_round, int thread) {
  uint64_t next = next_piece.load(std::memory_order_acquire);
  while (uint32_t(next >> 32) == of_round && int64_t(uint32_t(next)) < pieces.load(std::memory_order_acquire)) {
    if (!next_piece.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
    // The piece is ours, and the round cannot end before it is done.
    piece(work, int64_t(uint32_t(next)), thread);
    done.fetch_add(1, std::memory_order_release);
    next = next_piece.load(std::memory_order_acquire);
  }
}

}  // namespace kvhive

using namespace kvhive;

// For tests: run `count` pieces and say how often each was done, and by which thread it was done last.
KVHIVE_EXPORT void kvhive_team_try(int64_t count, int64_t threads, int32_t* times, int32_t* by) {
  for_pieces(count, int(threads), [&](int64_t piece, int thread) {
    __atomic_fetch_add(times + piece, 1, __ATOMIC_RELAXED);
    by[piece] = thread;
  });
}
