// Linear layers over packed weights: y = x Wᵀ + b.
//
// A few rows are bound by the reading of weights, many by the arithmetic; the same loops serve both. A piece of
// work is some rows and some panels: few rows take long runs of panels, many rows come in groups whose inputs
// stay in a core's cache while the panels pass.
#include "linear_tile.h"

#include <vector>

#include "parallel.h"

namespace kvhive {
namespace {

// Rows of a group; a multiple of the rows of a tile.
constexpr int64_t GROUP_ROWS = 96;
// Inputs that are summed up before the next panel: as much of a panel as the nearest cache holds.
constexpr int64_t GROUP_INPUTS = 1024;
// Bytes of weights that are worth a piece of its own, and panels of a piece that has many rows.
constexpr int64_t PIECE_BYTES = 65536;
constexpr int64_t PIECE_PANELS = 4;

template <typename T, typename Weights>
class Linear {
 public:
  Linear(const T* x, const typename Weights::Stored* weights, const T* bias, T* y, int64_t rows, int64_t inputs,
         int64_t outputs)
      : x(x), weights(weights), bias(bias), y(y), rows(rows), inputs(inputs), outputs(outputs),
        panels((outputs + PANEL - 1) / PANEL) {}

  void run(int threads) const {
    int64_t groups = (rows + GROUP_ROWS - 1) / GROUP_ROWS, bytes = inputs * ROW_BYTES;
    int64_t fitting = rows > 2 * TILE_ROWS ? PIECE_PANELS : std::max<int64_t>(1, PIECE_BYTES / bytes);
    int64_t fair = std::max<int64_t>(1, panels * groups / (SHARES * threads));
    // Whole runs of the panels that few rows take at once, or the last run of each piece would be slow.
    int64_t run = panels_for(rows), most = std::max(run, std::min(fitting, fair) / run * run);
    int64_t pieces = (panels + most - 1) / most;
    for_pieces(pieces * groups, threads, [&](int64_t piece, int) {
      int64_t row = piece / pieces * GROUP_ROWS, panel = place_of_turn(piece % pieces, pieces, threads) * most;
      compute(row, std::min(GROUP_ROWS, rows - row), panel, std::min(panels, panel + most));
    });
  }

 private:
  static constexpr int64_t ROW_BYTES = Weights::ROW * sizeof(typename Weights::Stored);

  const T* x;
  const typename Weights::Stored* weights;
  const T* bias;
  T* y;
  int64_t rows, inputs, outputs, panels;

  void compute(int64_t row, int64_t count, int64_t begin, int64_t end) const {
    static thread_local std::vector<float> memory;
    int64_t run = panels_for(count), scratch_stride = run * PANEL;
    bool widens = sizeof(T) != sizeof(float);
    memory.resize(count * (scratch_stride + (widens ? inputs : 0)));
    float* scratch = memory.data();
    Tile<Weights> tile;
    tile.x = widen(x + row * inputs, count * inputs, scratch + count * scratch_stride);
    tile.x_stride = inputs;
    tile.panel_stride = inputs * Weights::ROW;
    for (int64_t panel = begin, taken; panel < end; panel += taken) {
      taken = run <= end - panel ? run : 1;
      // Sums that are the result as they stand are formed in their place.
      bool direct = !widens && !bias && (panel + taken) * PANEL <= outputs;
      tile.sums = direct ? (float*)y + row * outputs + panel * PANEL : scratch;
      tile.sums_stride = direct ? outputs : scratch_stride;
      multiply_inputs(tile, count, weights + panel * tile.panel_stride, taken);
      if (!direct) write(row, count, panel, taken, scratch, scratch_stride);
    }
  }

  void multiply_inputs(Tile<Weights> tile, int64_t count, const typename Weights::Stored* from,
                       int64_t taken) const {
    const float* begin = tile.x;
    for (int64_t k = 0; k < inputs; k += GROUP_INPUTS) {
      tile.x = begin + k;
      tile.inputs = std::min(GROUP_INPUTS, inputs - k);
      tile.weights = from + k * Weights::ROW;
      tile.adds = k > 0;
      tile.ahead = (const char*)(tile.weights + taken * tile.panel_stride);
      tile.pace = taken * ROW_BYTES;
      taken > 1 ? multiply_few(count, tile) : multiply_rows(count, tile);
    }
  }

  static const float* widen(const float* from, int64_t, float*) { return from; }
  static const float* widen(const bf16* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += LANES) store(to + i, load(from + i, lanes(i, count)), lanes(i, count));
    return to;
  }

  void write(int64_t row, int64_t count, int64_t panel, int64_t taken, const float* sums, int64_t stride) const {
    int64_t begin = panel * PANEL, end = std::min(outputs, begin + taken * PANEL);
    for (int64_t r = 0; r < count; r++)
      for (int64_t n = begin; n < end; n += LANES) {
        int here = lanes(n, end);
        floats sum = load(sums + r * stride + n - begin, here);
        if (bias) sum += load(bias + n, here);
        store(y + (row + r) * outputs + n, sum, here);
      }
  }
};

// Lay weights [outputs, inputs] out in panels; outputs that a last panel lacks are zeros.
template <typename T, typename Place>
void pack(const T* weights, int64_t outputs, int64_t inputs, int threads, Place place) {
  int64_t panels = (outputs + PANEL - 1) / PANEL;
  for_each(panels, threads, [&](int64_t panel) {
    for (int64_t lane = 0; lane < LANES; lane++) {
      int64_t low = panel * PANEL + lane, high = low + LANES;
      for (int64_t k = 0; k < inputs; k++) {
        T zero{};
        place(panel * inputs + k, lane, low < outputs ? weights[low * inputs + k] : zero,
              high < outputs ? weights[high * inputs + k] : zero);
      }
    }
  });
}

}  // namespace
}  // namespace kvhive

using namespace kvhive;

// Elements of a packed weight: floats, or words where bfloat16 holds the weights.
KVHIVE_EXPORT int64_t kvhive_packed_size(int64_t halves, int64_t outputs, int64_t inputs) {
  return (outputs + PANEL - 1) / PANEL * inputs * (halves ? LANES : PANEL);
}

KVHIVE_EXPORT void kvhive_pack_whole(const float* weights, float* packed, int64_t outputs, int64_t inputs,
                                     int64_t threads) {
  pack(weights, outputs, inputs, int(threads), [&](int64_t row, int64_t lane, float low, float high) {
    packed[row * PANEL + lane] = low;
    packed[row * PANEL + LANES + lane] = high;
  });
}

KVHIVE_EXPORT void kvhive_pack_halves(const bf16* weights, uint32_t* packed, int64_t outputs, int64_t inputs,
                                      int64_t threads) {
  pack(weights, outputs, inputs, int(threads), [&](int64_t row, int64_t lane, bf16 low, bf16 high) {
    packed[row * LANES + lane] = uint32_t(low.bits) | uint32_t(high.bits) << 16;
  });
}

// x, bias and y are of one dtype, bias may be null; `halves` says how the weights are packed.
KVHIVE_EXPORT void kvhive_linear(int64_t dtype, int64_t halves, const void* x, const void* weights,
                                 const void* bias, void* y, int64_t rows, int64_t inputs, int64_t outputs,
                                 int64_t threads) {
  auto run = [&](auto of, auto stored) {
    using T = decltype(of);
    using Weights = decltype(stored);
    Linear<T, Weights>((const T*)x, (const typename Weights::Stored*)weights, (const T*)bias, (T*)y, rows, inputs,
                       outputs)
        .run(int(threads));
  };
  if (dtype == FLOAT32)
    halves ? run(float(), HalfWeights()) : run(float(), WholeWeights());
  else
    halves ? run(bf16(), HalfWeights()) : run(bf16(), WholeWeights());
}
