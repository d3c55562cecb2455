// The largest of each row, and the largest after noise.
#include <cmath>

#include "elementary.h"
#include "parallel.h"

namespace kvhive {
namespace {

struct Best {
  double value = -INFINITY;
  int64_t token = 0;

  // Earlier tokens come first, so that ties go to the lowest.
  void offer(double other, int64_t its_token) {
    if (other > value) *this = {other, its_token};
  }
};

// Tokens that are looked at together: as vectors first, one by one only where the best may be among them.
constexpr int64_t GROUP = 8 * LANES;

template <typename T>
float value_at(const T* row, int64_t token) {
  return load(row + token, 1)[0];
}

// The row's largest value and its first place; NaN and the first NaN's place if there is one.
template <typename T>
void largest_of(const T* row, int64_t vocab, T* value, int64_t* token) {
  Best best;
  for (int64_t begin = 0; begin < vocab; begin += GROUP) {
    int64_t end = begin + GROUP < vocab ? begin + GROUP : vocab;
    floats top = broadcast(-INFINITY);
    ints odd = {};
    for (int64_t i = begin; i < end; i += LANES) {
      int count = lanes(i, end);
      floats x = load(row + i, count);
      if (count < LANES) x = lane_numbers() < broadcast(float(count)) ? x : broadcast(-INFINITY);
      top = larger(x, top);
      odd |= (x != x);
    }
    bool has_nan = false;
    for (int i = 0; i < LANES; i++) has_nan |= odd[i] != 0;
    if (!has_nan && !(lane_max(top) > best.value)) continue;
    for (int64_t i = begin; i < end; i++) {
      float x = value_at(row, i);
      if (x != x) {
        value[0] = row[i];
        *token = i;
        return;
      }
      best.offer(x, i);
    }
  }
  value[0] = row[best.token];
  *token = best.token;
}

template <typename T>
void greedy(const T* logits, T* values, int64_t* tokens, int64_t rows, int64_t vocab, int64_t threads) {
  for_each(rows, threads_for(rows * vocab, threads), [&](int64_t r) {
    largest_of(logits + r * vocab, vocab, values + r, tokens + r);
  });
}

// What a row's noise is drawn from; mirrored by library.py.
struct Stream {
  uint32_t low, high, choice, position;
};

// Counters whose noise is drawn together: each gives that of four neighbouring tokens.
constexpr int COUNTERS = 32;
constexpr int64_t DRAWN = 4 * COUNTERS;

// Standard Gumbel noise of tokens [4 * first, 4 * first + DRAWN): kernels/philox.py says how it is defined.
void gumbel_noise(const Stream& stream, uint32_t first, float* noise) {
  uint32_t c0[COUNTERS], c1[COUNTERS], c2[COUNTERS], c3[COUNTERS];
  for (int i = 0; i < COUNTERS; i++) {
    c0[i] = first + i;
    c1[i] = stream.position;
    c2[i] = stream.choice;
    c3[i] = 0;
  }
  uint32_t low = stream.low, high = stream.high;
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < COUNTERS; i++) {
      uint64_t product_0 = uint64_t(0xD2511F53u) * c0[i], product_1 = uint64_t(0xCD9E8D57u) * c2[i];
      c0[i] = uint32_t(product_1 >> 32) ^ c1[i] ^ low;
      c2[i] = uint32_t(product_0 >> 32) ^ c3[i] ^ high;
      c1[i] = uint32_t(product_1);
      c3[i] = uint32_t(product_0);
    }
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  for (int i = 0; i < COUNTERS; i++) {
    noise[4 * i] = float(int32_t(c0[i] >> 9));
    noise[4 * i + 1] = float(int32_t(c1[i] >> 9));
    noise[4 * i + 2] = float(int32_t(c2[i] >> 9));
    noise[4 * i + 3] = float(int32_t(c3[i] >> 9));
  }
  for (int i = 0; i < DRAWN; i += LANES) {
    floats u = (load(noise + i) + broadcast(0.5f)) * broadcast(0x1p-23f);
    store(noise + i, -log(-log(u)));
  }
}

// More than the largest noise there is, -log(-log(1 - 2^-24)).
constexpr double MOST_NOISE = 16.64;

template <typename T>
Best largest_with_noise(const T* row, int64_t begin, int64_t end, const Stream& stream) {
  Best best;
  float noise[DRAWN];
  for (int64_t first = begin; first < end; first += DRAWN) {
    int64_t count = end - first < DRAWN ? end - first : DRAWN;
    const T* scores = row + first;
    T top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; i++) top = scores[i] > top ? scores[i] : top;
    if (!(top + MOST_NOISE > best.value)) continue;  // none of them can win: not worth its noise
    gumbel_noise(stream, uint32_t(first / 4), noise);
    for (int64_t i = 0; i < count; i++) best.offer(T(scores[i] + T(noise[i])), first + i);
  }
  return best;
}

// Tokens that one thread passes over; a multiple of DRAWN.
constexpr int64_t SLICE = 8192;

template <typename T>
void gumbel_argmax(const T* scores, const Stream* streams, int64_t* tokens, Best* scratch, int64_t rows,
                   int64_t vocab, int64_t threads) {
  int64_t slices = (vocab + SLICE - 1) / SLICE;
  // Noise costs a few times what passing over an element does.
  for_each(rows * slices, threads_for(4 * rows * vocab, threads), [&](int64_t i) {
    int64_t row = i / slices, begin = i % slices * SLICE;
    int64_t end = begin + SLICE < vocab ? begin + SLICE : vocab;
    scratch[i] = largest_with_noise(scores + row * vocab, begin, end, streams[row]);
  });
  for (int64_t row = 0; row < rows; row++) {
    Best best;
    for (const Best* slice = scratch + row * slices; slice < scratch + (row + 1) * slices; slice++)
      best.offer(slice->value, slice->token);
    tokens[row] = best.token;
  }
}

}  // namespace
}  // namespace kvhive

using namespace kvhive;

// logits [rows, vocab], dense; values [rows] of the same type.
KVHIVE_EXPORT void kvhive_greedy(int64_t dtype, const void* logits, void* values, int64_t* tokens, int64_t rows,
                                 int64_t vocab, int64_t threads) {
  if (dtype == FLOAT32)
    greedy((const float*)logits, (float*)values, tokens, rows, vocab, threads);
  else
    greedy((const bf16*)logits, (bf16*)values, tokens, rows, vocab, threads);
}

// Bytes of scratch that the next function needs.
KVHIVE_EXPORT int64_t kvhive_gumbel_scratch(int64_t rows, int64_t vocab) {
  return rows * ((vocab + SLICE - 1) / SLICE) * int64_t(sizeof(Best));
}

// scores [rows, vocab], dense, float32 or float64.
KVHIVE_EXPORT void kvhive_gumbel_argmax(int64_t dtype, const void* scores, const void* streams, int64_t* tokens,
                                        void* scratch, int64_t rows, int64_t vocab, int64_t threads) {
  if (dtype == FLOAT32)
    gumbel_argmax((const float*)scores, (const Stream*)streams, tokens, (Best*)scratch, rows, vocab, threads);
  else
    gumbel_argmax((const double*)scores, (const Stream*)streams, tokens, (Best*)scratch, rows, vocab, threads);
}
