// The threads of this process that compute: the one that calls, and helpers that come when there is work.
//
// Work is cut into numbered pieces, and whoever is free takes the next. The caller takes too, and goes on as soon
// as all pieces are done, not when all helpers have come: one whose core was given to another process is not
// waited for, unless it lost the core amid a piece. Between pieces a helper looks for work for some hundred
// microseconds, at the end of which it yields to whoever wants the core, and then sleeps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace kvhive {

class Team {
 public:
  using Piece = void (*)(void* work, int64_t piece, int thread);

  // Call piece(work, i, t) for all i below `count`, with t below `threads` and at no time twice the same.
  // One team at a time works: who finds it taken does all pieces alone.
  void run(int64_t count, int threads, void* work, Piece piece);

  // That of this process. It never ends: at exit its threads may still be looking.
  static Team& of_process();

 private:
  void grow(int helpers);
  void help(int thread);
  void take_pieces(uint32_t round, int thread);
  bool another_round(uint32_t seen);

  std::mutex taken;
  int helpers = 0;

  // A round is one call of run. The next piece stands behind its round's number, so that a helper who comes late
  // takes nothing of a later round by mistake; the others change while the next piece is none.
  std::atomic<uint32_t> round{0};
  std::atomic<uint64_t> next_piece{0};
  std::atomic<int64_t> pieces{0}, done{0};
  std::atomic<int> seats{0};
  void* work = nullptr;
  Piece piece = nullptr;

  std::mutex asleep;
  std::condition_variable woken;
  std::atomic<int> sleepers{0};
};

}  // namespace kvhive
