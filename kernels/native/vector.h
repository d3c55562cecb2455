// Vectors of floats as wide as the machine's registers, in the vector extension of GCC and clang.
//
// Multiply-add is explicit (`fma`) and the compiler may not form others (-ffp-contract=off): what a row's bits
// are is decided here, not by an optimiser.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvhive {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

// bfloat16 as it lies in memory: the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

inline floats broadcast(float x) {
#if defined(__AVX512F__)
  return (floats)_mm512_set1_ps(x);
#elif defined(__AVX__)
  return (floats)_mm256_set1_ps(x);
#else
  return floats{x, x, x, x};
#endif
}

// a * b + c, rounded once where the machine can.
inline floats fma(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline floats sqrt(floats x) {
  for (int i = 0; i < LANES; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

template <typename To, typename From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "a change of type, not of size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

inline floats load(const float* from) {
  floats x;
  memcpy(&x, from, sizeof(x));
  return x;
}

inline floats load(const bf16* from) {
  halves x;
  memcpy(&x, from, sizeof(x));
  return bits_of<floats>(__builtin_convertvector(x, words) << 16);
}

inline void store(float* to, floats x) { memcpy(to, &x, sizeof(x)); }

// Rounds to nearest, ties to even; a NaN stays one.
inline void store(bf16* to, floats x) {
  words bits = bits_of<words>(x);
  words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  words quiet = (bits >> 16) | 0x40;
  halves result = __builtin_convertvector(x == x ? rounded : quiet, halves);
  memcpy(to, &result, sizeof(result));
}

// The first `count` lanes only, zeros in the others; never touches memory beyond them.
template <typename T>
inline floats load(const T* from, int count) {
  if (count == LANES) return load(from);
  T padded[LANES] = {};
  memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <typename T>
inline void store(T* to, floats x, int count) {
  if (count == LANES) return store(to, x);
  T padded[LANES];
  store(padded, x);
  memcpy(to, padded, count * sizeof(T));
}

// How many lanes of [begin, end) a vector that starts at `begin` may touch.
inline int lanes(int64_t begin, int64_t end) { return end - begin < LANES ? int(end - begin) : LANES; }

// x as it would be after a trip through memory of type T.
template <typename T>
inline floats rounded_to(floats x) {
  T memory[LANES];
  store(memory, x);
  return load(memory);
}

// a where it is larger, else b: a NaN in `a` never wins.
inline floats larger(floats a, floats b) { return a > b ? a : b; }

inline float lane_sum(floats x) {
  float lane[LANES];
  memcpy(lane, &x, sizeof(x));
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lane[i] += lane[i + width];
  return lane[0];
}

inline float lane_max(floats x) {
  float lane[LANES];
  memcpy(lane, &x, sizeof(x));
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
  return lane[0];
}

inline floats lane_numbers() {
  floats x;
  for (int i = 0; i < LANES; i++) x[i] = float(i);
  return x;
}

}  // namespace kvhive
