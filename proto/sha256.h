// SHA-256 of messages that are padded already: the compression function of FIPS 180-4, section 6.2.2, by the
// CPU's own instructions where it has them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvhive {

constexpr int64_t SHA256_BLOCK = 64, SHA256_DIGEST = 32;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(16) constexpr uint32_t ROUND_CONSTANTS[64] = {
  0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
  0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
  0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
  0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
  0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
  0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
  0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
  0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

// ... and of the square roots of the first eight.
constexpr uint32_t INITIAL_STATE[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

inline uint32_t load_big_endian(const uint8_t* bytes) {
  return uint32_t(bytes[0]) << 24 | uint32_t(bytes[1]) << 16 | uint32_t(bytes[2]) << 8 | bytes[3];
}

inline void store_big_endian(uint8_t* bytes, uint32_t word) {
  for (int i = 0; i < 4; i++) bytes[i] = uint8_t(word >> (24 - 8 * i));
}

inline uint32_t rotated(uint32_t x, int right) { return x >> right | x << (32 - right); }

// Mix `count` blocks of 64 bytes into the state, on any CPU.
inline void compress_portably(uint32_t state[8], const uint8_t* blocks, int64_t count) {
  for (; count > 0; count--, blocks += SHA256_BLOCK) {
    uint32_t w[64];
    for (int t = 0; t < 16; t++) w[t] = load_big_endian(blocks + 4 * t);
    for (int t = 16; t < 64; t++) {
      uint32_t x = w[t - 15], y = w[t - 2];
      w[t] = w[t - 16] + (rotated(x, 7) ^ rotated(x, 18) ^ x >> 3) + w[t - 7] +
             (rotated(y, 17) ^ rotated(y, 19) ^ y >> 10);
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int t = 0; t < 64; t++) {
      uint32_t t1 = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) +
                    ROUND_CONSTANTS[t] + w[t];
      uint32_t t2 = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    uint32_t mixed[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; i++) state[i] += mixed[i];
  }
}

#if defined(__x86_64__)
inline bool has_sha_instructions() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1) || !(c & bit_SSSE3)) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}

// The same by the instructions for it: four rounds at a time on the state's halves ABEF and CDGH.
__attribute__((target("sha,sse4.1,ssse3"))) inline void compress_by_instructions(uint32_t state[8],
                                                                                 const uint8_t* blocks,
                                                                                 int64_t count) {
  const __m128i big_endian = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
  __m128i abef = _mm_set_epi32(int(state[0]), int(state[1]), int(state[4]), int(state[5]));
  __m128i cdgh = _mm_set_epi32(int(state[2]), int(state[3]), int(state[6]), int(state[7]));
  for (; count > 0; count--, blocks += SHA256_BLOCK) {
    __m128i w[4], abef_before = abef, cdgh_before = cdgh;
    for (int t = 0; t < 16; t++) {
      __m128i& own = w[t % 4];  // holds the words of four groups of rounds ago
      if (t < 4) {
        own = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(blocks + 16 * t)), big_endian);
      } else {
        __m128i last = w[(t + 3) % 4];
        __m128i sevenths = _mm_alignr_epi8(last, w[(t + 2) % 4], 4);
        own = _mm_add_epi32(_mm_sha256msg1_epu32(own, w[(t + 1) % 4]), sevenths);
        own = _mm_sha256msg2_epu32(own, last);
      }
      __m128i added = _mm_add_epi32(own, _mm_load_si128((const __m128i*)(ROUND_CONSTANTS + 4 * t)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(added, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  alignas(16) uint32_t low[4], high[4];
  _mm_store_si128((__m128i*)low, abef);   // F E B A
  _mm_store_si128((__m128i*)high, cdgh);  // H G D C
  const uint32_t after[8] = {low[3], low[2], high[3], high[2], low[1], low[0], high[1], high[0]};
  std::memcpy(state, after, sizeof(after));
}
#else
inline bool has_sha_instructions() { return false; }
inline void compress_by_instructions(uint32_t state[8], const uint8_t* blocks, int64_t count) {
  compress_portably(state, blocks, count);
}
#endif

}  // namespace kvhive
