// Gated activations: act(gate) * up.
#include "elementary.h"
#include "parallel.h"

namespace kvhive {
namespace {

floats sigmoid(floats x) { return broadcast(1.0f) / (broadcast(1.0f) + exp(-x)); }

struct Silu {
  static floats of(floats gate) { return gate / (broadcast(1.0f) + exp(-gate)); }
};

// (1 + tanh u) / 2 is the sigmoid of 2 u.
struct GeluTanh {
  static floats of(floats gate) {
    floats cubic = fma(gate * gate * gate, broadcast(0.044715f), gate);
    return gate * sigmoid(cubic * broadcast(1.5957691216f));  // 2 sqrt(2 / pi)
  }
};

template <typename Activation, typename T>
void gate(const T* gate_up, T* out, int64_t rows, int64_t width, int64_t threads) {
  for_each(rows, threads_for(rows * width, threads), [&](int64_t r) {
    const T* own = gate_up + r * 2 * width;
    for (int64_t i = 0; i < width; i += LANES) {
      int count = lanes(i, width);
      floats up = load(own + width + i, count);
      store(out + r * width + i, Activation::of(load(own + i, count)) * up, count);
    }
  });
}

template <typename Activation>
void gate(int64_t dtype, const void* in, void* out, int64_t rows, int64_t width, int64_t threads) {
  if (dtype == FLOAT32)
    gate<Activation>((const float*)in, (float*)out, rows, width, threads);
  else
    gate<Activation>((const bf16*)in, (bf16*)out, rows, width, threads);
}

}  // namespace
}  // namespace kvhive

using namespace kvhive;

// gate_up [rows, 2 * width] and out [rows, width], dense.
KVHIVE_EXPORT void kvhive_silu_and_mul(int64_t dtype, const void* gate_up, void* out, int64_t rows, int64_t width,
                                       int64_t threads) {
  gate<Silu>(dtype, gate_up, out, rows, width, threads);
}

KVHIVE_EXPORT void kvhive_gelu_tanh_and_mul(int64_t dtype, const void* gate_up, void* out, int64_t rows,
                                            int64_t width, int64_t threads) {
  gate<GeluTanh>(dtype, gate_up, out, rows, width, threads);
}
