// exp, log and tanh of vectors, good to about 1e-7 of the result; coefficients in their lines.
#pragma once

#include "vector.h"

namespace kvhive {

constexpr float LOG2_E = 1.44269504f;
constexpr float LOG2_E_REST = 1.92596300e-8f;  // log2(e) - LOG2_E

// 2^(whole + fraction) for |fraction| <= 0.5 and -126 <= whole <= 127, `magic` being 1.5 * 2^23 + whole:
// the sum's lowest bits are then the integer. Minimax of degree 6 with 2^0 exactly 1.
inline floats power_of_two(floats magic, floats fraction) {
  floats p = broadcast(1.54614478e-4f);
  p = fma(p, fraction, broadcast(1.33908668e-3f));
  p = fma(p, fraction, broadcast(9.61805694e-3f));
  p = fma(p, fraction, broadcast(5.55035695e-2f));
  p = fma(p, fraction, broadcast(2.40226507e-1f));
  p = fma(p, fraction, broadcast(6.93147182e-1f));
  p = fma(p, fraction, broadcast(1.0f));
  return p * bits_of<floats>((bits_of<words>(magic) + 127) << 23);
}

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// 2^x for x <= 0, as softmax needs it: 2^-Inf is 0, and so is what float32 could only hold denormalised.
inline floats exp2_of_negative(floats x) {
  floats magic = x + broadcast(MAGIC);
  floats result = power_of_two(magic, x - (magic - broadcast(MAGIC)));
  return x < broadcast(-126.0f) ? floats{} : result;
}

inline floats exp(floats x) {
  floats magic = fma(x, broadcast(LOG2_E), broadcast(MAGIC));
  floats whole = magic - broadcast(MAGIC);
  // The product's rounding error would be that of the whole exponent; so it is formed in two parts.
  floats fraction = fma(x, broadcast(LOG2_E), -whole);
  fraction = fma(x, broadcast(LOG2_E_REST), fraction);
  floats result = power_of_two(magic, fraction);
  result = x < broadcast(-87.3f) ? floats{} : result;
  return x > broadcast(88.3f) ? broadcast(__builtin_inff()) : result;
}

// For positive, normal x. Coefficients: Cephes, logf.
inline floats log(floats x) {
  // Split into a power of two and a factor between sqrt(1/2) and sqrt(2).
  words bits = bits_of<words>(x) - 0x3F3504F3u;
  floats exponent = __builtin_convertvector(bits_of<ints>(bits) >> 23, floats);
  floats f = bits_of<floats>((bits & 0x7FFFFFu) + 0x3F3504F3u) - broadcast(1.0f);
  floats square = f * f;
  floats p = broadcast(7.0376836292e-2f);
  p = fma(p, f, broadcast(-1.1514610310e-1f));
  p = fma(p, f, broadcast(1.1676998740e-1f));
  p = fma(p, f, broadcast(-1.2420140846e-1f));
  p = fma(p, f, broadcast(1.4249322787e-1f));
  p = fma(p, f, broadcast(-1.6668057665e-1f));
  p = fma(p, f, broadcast(2.0000714765e-1f));
  p = fma(p, f, broadcast(-2.4999993993e-1f));
  p = fma(p, f, broadcast(3.3333331174e-1f));
  p = p * f * square;
  p = fma(exponent, broadcast(-2.12194440e-4f), p);  // ln 2 = 0.693359375 - 2.12194440e-4
  p = fma(square, broadcast(-0.5f), p);
  return fma(exponent, broadcast(0.693359375f), f + p);
}

// Coefficients of the middle: Cephes, tanhf.
inline floats tanh(floats x) {
  floats square = x * x;
  floats p = broadcast(-5.70498872745e-3f);
  p = fma(p, square, broadcast(2.06390887954e-2f));
  p = fma(p, square, broadcast(-5.37397155531e-2f));
  p = fma(p, square, broadcast(1.33314422036e-1f));
  p = fma(p, square, broadcast(-3.33332819422e-1f));
  floats middle = fma(p * square, x, x);
  floats outer = broadcast(1.0f) - broadcast(2.0f) / (exp(x + x) + broadcast(1.0f));
  return square < broadcast(0.390625f) ? middle : outer;
}

}  // namespace kvhive
