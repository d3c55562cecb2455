// Whole blocks out of a pool, into one, and inside one.
#include <cstring>

#include "parallel.h"

namespace kvhive {
namespace {

bool inside(const int64_t* blocks, int64_t count, int64_t pool_blocks) {
  bool all = true;
  for (int64_t i = 0; i < count; i++) all &= blocks[i] >= 0 && blocks[i] < pool_blocks;
  return all;
}

}  // namespace
}  // namespace kvhive

using namespace kvhive;

// to[targets[i]] = from[sources[i]], in blocks of `bytes`; a null index list counts 0, 1, 2, ...
// Returns 1, having copied nothing, when an index lies outside its side's blocks.
KVHIVE_EXPORT int kvhive_copy_blocks(const char* from, const int64_t* sources, int64_t from_blocks, char* to,
                                     const int64_t* targets, int64_t to_blocks, int64_t count, int64_t bytes,
                                     int64_t threads) {
  if (sources && !inside(sources, count, from_blocks)) return 1;
  if (targets && !inside(targets, count, to_blocks)) return 1;
  for_each(count, threads_for(count * bytes / 4, threads), [&](int64_t i) {
    memcpy(to + (targets ? targets[i] : i) * bytes, from + (sources ? sources[i] : i) * bytes, bytes);
  });
  return 0;
}
