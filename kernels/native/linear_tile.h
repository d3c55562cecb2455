// The arithmetic of a linear layer over one panel: the weights of some neighbouring outputs.
//
// Weights are packed panel by panel, [inputs][PANEL], so that they are read in the order in which they lie.
// Each output is one chain of multiply-adds over the inputs, in their order, whatever else is computed with it:
// that makes a row's bits independent of its batch.
#pragma once

#include "vector.h"

namespace kvhive {

constexpr int PANEL = 2 * LANES;

// Rows whose sums, two vectors each, leave registers for what is multiplied where there are sixteen.
constexpr int TILE_ROWS = 6;

// Weights as float32: a panel's row is PANEL floats.
struct WholeWeights {
  using Stored = float;
  static constexpr int ROW = PANEL;
  static void load_row(const float* from, floats& low, floats& high) {
    low = load(from);
    high = load(from + LANES);
  }
};

// Weights that bfloat16 holds exactly: word j has outputs j (lower half) and j + LANES of the panel, so that a
// shift and a mask are all it takes to widen them.
struct HalfWeights {
  using Stored = uint32_t;
  static constexpr int ROW = LANES;
  static void load_row(const uint32_t* from, floats& low, floats& high) {
    words both;
    memcpy(&both, from, sizeof(both));
    low = bits_of<floats>(both << 16);
    high = bits_of<floats>(both & 0xFFFF0000u);
  }
};

// Which rows meet which weights: inputs [0, inputs) of both, and where the sums go.
template <typename Weights>
struct Tile {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const typename Weights::Stored* weights = nullptr;
  int64_t panel_stride = 0;  // of `weights`, from one panel to the next
  int64_t inputs = 0;
  float* sums = nullptr;  // [rows][sums_stride]
  int64_t sums_stride = 0;
  bool adds = false;            // to the sums that are there
  const char* ahead = nullptr;  // memory to ask for meanwhile, a step of `pace` bytes for each input
  int64_t pace = 0;
};

#define KVHIVE_UNROLL _Pragma("GCC unroll 16")

template <typename Weights, int ROWS, int PANELS>
__attribute__((noinline)) void multiply(const Tile<Weights> tile) {
  floats sums[ROWS][PANELS][2];
  KVHIVE_UNROLL for (int r = 0; r < ROWS; r++) KVHIVE_UNROLL for (int p = 0; p < PANELS; p++)
    KVHIVE_UNROLL for (int half = 0; half < 2; half++)
      sums[r][p][half] =
          tile.adds ? load(tile.sums + r * tile.sums_stride + p * PANEL + half * LANES) : broadcast(0);
  const char* ahead = tile.ahead;
  for (int64_t k = 0; k < tile.inputs; k++, ahead += tile.pace) {
    __builtin_prefetch(ahead);
    KVHIVE_UNROLL for (int p = 0; p < PANELS; p++) {
      floats low, high;
      Weights::load_row(tile.weights + p * tile.panel_stride + k * Weights::ROW, low, high);
      KVHIVE_UNROLL for (int r = 0; r < ROWS; r++) {
        floats x = broadcast(tile.x[r * tile.x_stride + k]);
        sums[r][p][0] = fma(x, low, sums[r][p][0]);
        sums[r][p][1] = fma(x, high, sums[r][p][1]);
      }
    }
  }
  KVHIVE_UNROLL for (int r = 0; r < ROWS; r++) KVHIVE_UNROLL for (int p = 0; p < PANELS; p++)
    KVHIVE_UNROLL for (int half = 0; half < 2; half++)
      store(tile.sums + r * tile.sums_stride + p * PANEL + half * LANES, sums[r][p][half]);
}

// Panels that so few rows take at once: a single chain of sums would wait for itself. Three rows of two panels
// would need more registers than there are.
constexpr int panels_for(int64_t rows) {
  return rows == 1 ? 6 : rows == 2 ? 2 : 1;
}

// Multiply one row or two by panels_for(rows) panels.
template <typename Weights>
inline void multiply_few(int64_t rows, const Tile<Weights>& tile) {
  rows == 1 ? multiply<Weights, 1, panels_for(1)>(tile) : multiply<Weights, 2, panels_for(2)>(tile);
}

// Multiply any number of rows by one panel, and spread what is asked for ahead over all of them.
template <typename Weights>
inline void multiply_rows(int64_t rows, Tile<Weights> tile) {
  tile.pace /= (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t left = rows, taken; left; left -= taken) {
    taken = left >= 9 || left == 6 ? 6 : left >= 7 || left == 4 ? 4 : left == 5 ? 5 : left;
    switch (taken) {
      case 6: multiply<Weights, 6, 1>(tile); break;
      case 5: multiply<Weights, 5, 1>(tile); break;
      case 4: multiply<Weights, 4, 1>(tile); break;
      case 3: multiply<Weights, 3, 1>(tile); break;
      case 2: multiply<Weights, 2, 1>(tile); break;
      default: multiply<Weights, 1, 1>(tile);
    }
    tile.x += taken * tile.x_stride;
    tile.sums += taken * tile.sums_stride;
    tile.ahead += tile.pace * tile.inputs;
  }
}

}  // namespace kvhive
