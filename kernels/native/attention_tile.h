// The arithmetic of attention over one tile: the keys and values of 64 neighbouring positions.
//
// Tiles lie at fixed positions of the sequence (0, 64, 128, ...), and within one the order of additions is the
// same whether one row or many are computed. That is what makes a token's bits independent of how its prompt
// was cut into chunks and of who else is in the batch.
#pragma once

#include "elementary.h"

namespace kvhive {

constexpr int TILE = 64;
constexpr int MOST_ROWS = 6;
constexpr int MOST_HEAD_DIM = 256;

// Registers that hold sums; the others hold what is multiplied.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int SUMS = 24;
#else
constexpr int SUMS = 12;
#endif

// The largest power of two of vectors per row that the registers have room for.
constexpr int vectors_for(int rows, int most) {
  int n = 1;
  while (2 * n <= most && 2 * n * rows <= SUMS) n *= 2;
  return n;
}

// Keys are packed for `multiply_keys`: panel by panel of so many tokens, each [head_dim][PANEL].
constexpr int PANEL = vectors_for(MOST_ROWS, TILE / LANES) * LANES;

// What a row sees of a tile: positions [first, last) of it, none if last <= first.
struct Visible {
  int first, last;
};

typedef float eight __attribute__((vector_size(32)));
typedef int32_t eight_ints __attribute__((vector_size(32)));
typedef uint16_t eight_halves __attribute__((vector_size(16)));
typedef uint32_t eight_words __attribute__((vector_size(32)));

#if defined(__clang__)
#define KVHIVE_MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define KVHIVE_MIX(a, b, ...) __builtin_shuffle(a, b, eight_ints{__VA_ARGS__})
#endif

inline eight load_eight(const float* from) {
  eight x;
  memcpy(&x, from, sizeof(x));
  return x;
}

inline eight load_eight(const bf16* from) {
  eight_halves x;
  memcpy(&x, from, sizeof(x));
  return bits_of<eight>(__builtin_convertvector(x, eight_words) << 16);
}

// to[i][j] = from[j][i] of eight rows; consecutive rows of `to` lie PANEL apart.
template <typename T>
inline void transpose_eight(const T* const* from, int64_t offset, float* to) {
  eight r[8], s[8];
  for (int i = 0; i < 8; i++) r[i] = load_eight(from[i] + offset);
  for (int i = 0; i < 8; i += 2) {
    s[i] = KVHIVE_MIX(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    s[i + 1] = KVHIVE_MIX(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int k = 0; k < 2; k++) {
      r[i + 2 * k] = KVHIVE_MIX(s[i + k], s[i + k + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + 2 * k + 1] = KVHIVE_MIX(s[i + k], s[i + k + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    eight low = KVHIVE_MIX(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    eight high = KVHIVE_MIX(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    memcpy(to + i * PANEL, &low, sizeof(low));
    memcpy(to + (i + 4) * PANEL, &high, sizeof(high));
  }
}

// Eight keys, at `t` of the tile, to their place in the panels of [head_dim][PANEL].
template <typename T>
inline void pack_eight_keys(const T* const* keys, int t, int head_dim, float* panels) {
  float* to = panels + (t / PANEL) * head_dim * PANEL + t % PANEL;
  for (int d = 0; d < head_dim; d += 8) transpose_eight(keys, d, to + d * PANEL);
}

// scores[r][t] = query[r] . key[t], summed from the first element to the last; undefined where not `wanted`.
template <int ROWS>
inline void multiply_keys(const float* query, int head_dim, const float* keys, Visible wanted, float* scores) {
  constexpr int N = vectors_for(ROWS, TILE / LANES), STEP = N * LANES;
  for (int t = wanted.first / STEP * STEP; t < wanted.last; t += STEP) {
    const float* panel = keys + (t / PANEL) * head_dim * PANEL;
    floats sums[ROWS][N] = {};
    for (int d = 0; d < head_dim; d++) {
      floats key[N];
#pragma GCC unroll 16
      for (int j = 0; j < N; j++)
        key[j] = load(panel + (j * LANES / PANEL) * head_dim * PANEL + d * PANEL + j * LANES % PANEL);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        floats q = broadcast(query[r * head_dim + d]);
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) sums[r][j] = fma(q, key[j], sums[r][j]);
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int j = 0; j < N; j++) store(scores + r * TILE + t + j * LANES, sums[r][j]);
  }
}

// out[r][d ..] = out[r][d ..] * decay[r] + sum of weights[r][t] * value[t][d ..] over t in [first, last).
template <int ROWS, int N, typename T>
inline void add_values_at(int64_t d, const float* weights, const T* const* values, int first, int last,
                          const float* decay, float* out, int stride) {
  floats sums[ROWS][N];
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < N; j++) sums[r][j] = load(out + r * stride + d + j * LANES) * broadcast(decay[r]);
  for (int t = first; t < last; t++) {
    const T* value = values[t] + d;
    floats v[N], weight[ROWS];
    // Whichever of the two is fewer stays in registers, or the sums would not.
    if constexpr (N <= ROWS) {
#pragma GCC unroll 16
      for (int j = 0; j < N; j++) v[j] = load(value + j * LANES);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        weight[r] = broadcast(weights[r * TILE + t]);
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) sums[r][j] = fma(weight[r], v[j], sums[r][j]);
      }
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) weight[r] = broadcast(weights[r * TILE + t]);
#pragma GCC unroll 16
      for (int j = 0; j < N; j++) {
        v[j] = load(value + j * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) sums[r][j] = fma(weight[r], v[j], sums[r][j]);
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < N; j++) store(out + r * stride + d + j * LANES, sums[r][j]);
}

// The same for all of a row; `width` is a multiple of LANES.
template <int ROWS, typename T>
inline void add_values(const float* weights, const T* const* values, int first, int last, const float* decay,
                       float* out, int width) {
  constexpr int N = vectors_for(ROWS, TILE / LANES);
  int64_t d = 0;
  for (; d + N * LANES <= width; d += N * LANES)
    add_values_at<ROWS, N>(d, weights, values, first, last, decay, out, width);
  for (; d < width; d += LANES) add_values_at<ROWS, 1>(d, weights, values, first, last, decay, out, width);
}

// A row's softmax so far: the largest score, before its scaling, and the sum of weights relative to it.
struct Softmax {
  float largest, sum;
};

constexpr float NOTHING = -__builtin_inff();

// What becomes of a product of query and key before the exponential.
struct Scaling {
  float scale, softcap;  // softcap 0 for none

  // The exponent of 2 is this times the difference to the largest: scaled last, it is rounded least.
  float to_log2() const { return softcap > 0 ? LOG2_E : scale * LOG2_E; }
};

// softcap * tanh(score * scale / softcap)
inline void cap(float* scores, Scaling scaling) {
  floats inside = broadcast(scaling.scale / scaling.softcap), outside = broadcast(scaling.softcap);
  for (int t = 0; t < TILE; t += LANES) store(scores + t, tanh(load(scores + t) * inside) * outside);
}

inline void hide(float* scores, Visible visible) {
  for (int t = 0; t < TILE; t += LANES) {
    floats at = lane_numbers() + broadcast(float(t)), score = load(scores + t);
    score = at < broadcast(float(visible.first)) ? broadcast(NOTHING) : score;
    store(scores + t, at >= broadcast(float(visible.last)) ? broadcast(NOTHING) : score);
  }
}

// Turn scores into weights, in place, and say by how much what was summed before must decay.
// Scores that a row does not see may be anything. A row that sees nothing of the tile keeps its state, and its
// weights are 0.
template <int ROWS>
inline void weigh(float* scores, const Visible* visible, Scaling scaling, Softmax* rows, float* decay) {
  floats to_log2 = broadcast(scaling.to_log2());
  float tile_sums[ROWS];
  for (int r = 0; r < ROWS; r++) {
    float* row = scores + r * TILE;
    if (scaling.softcap > 0) cap(row, scaling);
    if (visible[r].first > 0 || visible[r].last < TILE) hide(row, visible[r]);
    floats top = broadcast(NOTHING);
    for (int t = 0; t < TILE; t += LANES) top = larger(load(row + t), top);
    float before = rows[r].largest, seen = lane_max(top);
    float largest = seen > before ? seen : before;
    floats base = broadcast(largest == NOTHING ? 0.0f : largest);
    floats sum = {};
    for (int t = 0; t < TILE; t += LANES) {
      floats weight = exp2_of_negative((load(row + t) - base) * to_log2);
      store(row + t, weight);
      sum += weight;
    }
    tile_sums[r] = lane_sum(sum);
    decay[r] = before == largest ? 0.0f : before - largest;
    rows[r].largest = largest;
  }
  // The decays of all rows in as few exponentials as the vectors allow; 2^0 is exactly 1.
  for (int i = 0; i < ROWS; i += LANES) {
    int count = lanes(i, ROWS);
    store(decay + i, exp2_of_negative(load(decay + i, count) * to_log2), count);
  }
  for (int r = 0; r < ROWS; r++) rows[r].sum = rows[r].sum * decay[r] + tile_sums[r];
}

}  // namespace kvhive
