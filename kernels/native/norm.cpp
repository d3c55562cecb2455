// Root mean square normalisation, alone and with the residual addition before it.
#include "parallel.h"
#include "vector.h"

namespace kvhive {
namespace {

struct Rows {
  int64_t count, inner, outer_stride, inner_stride, hidden;
  // Row r of a tensor of two or three dimensions whose last one is dense.
  int64_t offset(int64_t r) const { return (r / inner) * outer_stride + (r % inner) * inner_stride; }
};

// Sum of squares. The order of additions is that of torch's own sum of a short row, so that most results
// equal the reference's to the last bit: four accumulators, the rest, then lane by lane.
template <typename T>
float sum_of_squares(const T* x, int64_t hidden) {
  constexpr int STREAMS = 4;
  floats sums[STREAMS] = {};
  int64_t i = 0;
  for (; i + STREAMS * LANES <= hidden; i += STREAMS * LANES)
    for (int k = 0; k < STREAMS; k++) {
      floats v = load(x + i + k * LANES);
      sums[k] += v * v;
    }
  for (; i + LANES <= hidden; i += LANES) {
    floats v = load(x + i);
    sums[0] += v * v;
  }
  for (int k = 1; k < STREAMS; k++) sums[0] += sums[k];
  float total = 0;
  if (i < hidden) {
    floats v = load(x + i, int(hidden - i));
    v *= v;
    for (int k = 0; k < hidden - i; k++) total += v[k];
  }
  for (int k = 0; k < LANES; k++) total += sums[0][k];
  return total;
}

// A weight of x's type applies after rounding to it, a float32 weight before: kernels/rms_norm.py.
template <typename T, typename W>
void scale_row(const T* x, const W* weight, T* out, int64_t hidden, float scale) {
  floats factor = broadcast(scale);
  for (int64_t i = 0; i < hidden; i += LANES) {
    int count = lanes(i, hidden);
    floats v = load(x + i, count) * factor;
    if (sizeof(W) != sizeof(float)) v = rounded_to<T>(v);
    store(out + i, v * load(weight + i, count), count);
  }
}

template <typename T, typename W>
void rms_norm(const T* x, T* residual, const W* weight, T* out, Rows rows, float eps, int64_t threads) {
  int64_t hidden = rows.hidden;
  for_each(rows.count, threads_for(rows.count * hidden, threads), [&](int64_t r) {
    const T* own = x + rows.offset(r);
    if (residual) {
      T* total = residual + r * hidden;
      for (int64_t i = 0; i < hidden; i += LANES) {
        int count = lanes(i, hidden);
        store(total + i, load(own + i, count) + load(total + i, count), count);
      }
      own = total;
    }
    float scale = 1.0f / __builtin_sqrtf(sum_of_squares(own, hidden) / float(hidden) + eps);
    scale_row(own, weight, out + r * hidden, hidden, scale);
  });
}

}  // namespace
}  // namespace kvhive

using namespace kvhive;

// x [count, hidden] with the strides of up to two dimensions before the last; residual dense or null, and then
// overwritten with the sum; out dense. weight_dtype is float32 or x's.
KVHIVE_EXPORT void kvhive_rms_norm(int64_t dtype, int64_t weight_dtype, const void* x, void* residual,
                                   const void* weight, void* out, int64_t count, int64_t inner,
                                   int64_t outer_stride, int64_t inner_stride, int64_t hidden, float eps,
                                   int64_t threads) {
  Rows rows{count, inner, outer_stride, inner_stride, hidden};
  if (dtype == FLOAT32)
    rms_norm((const float*)x, (float*)residual, (const float*)weight, (float*)out, rows, eps, threads);
  else if (weight_dtype == FLOAT32)
    rms_norm((const bf16*)x, (bf16*)residual, (const float*)weight, (bf16*)out, rows, eps, threads);
  else
    rms_norm((const bf16*)x, (bf16*)residual, (const bf16*)weight, (bf16*)out, rows, eps, threads);
}
