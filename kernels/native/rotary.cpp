// Rotary positions, and keys and values on their way into the pool.
#include "parallel.h"
#include "vector.h"

namespace kvhive {
namespace {

// One layer of the pool, seen as [blocks, 2, kv_heads, block_size, head_dim].
struct PoolLayer {
  char* memory;
  int64_t blocks, block_stride, kv_heads, block_size;

  template <typename T>
  T* key(int64_t slot, int64_t head, int64_t head_dim) const {
    int64_t inside = (head * block_size + slot % block_size) * head_dim;
    return (T*)memory + (slot / block_size) * block_stride + inside;
  }
  int64_t value_offset(int64_t head_dim) const { return kv_heads * block_size * head_dim; }
  bool has_all(const int64_t* slots, int64_t count) const {
    bool all = true;
    for (int64_t i = 0; i < count; i++) all &= slots[i] >= 0 && slots[i] < blocks * block_size;
    return all;
  }
};

// `to` may be `from`. Products are rounded before they are added, as the reference does it.
template <typename T>
void turn(const T* from, T* to, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += LANES) {
    int count = lanes(i, half);
    floats first = load(from + i, count), second = load(from + half + i, count);
    floats c = load(cos + i, count), s = load(sin + i, count);
    store(to + i, first * c - second * s, count);
    store(to + half + i, second * c + first * s, count);
  }
}

template <typename T>
void rotary(const T* x, T* out, const float* cos, const float* sin, int64_t tokens, int64_t heads,
            int64_t head_dim, int64_t token_stride, int64_t threads) {
  for_each(tokens, threads_for(tokens * heads * head_dim, threads), [&](int64_t t) {
    const float *c = cos + t * head_dim / 2, *s = sin + t * head_dim / 2;
    for (int64_t h = 0; h < heads; h++)
      turn(x + t * token_stride + h * head_dim, out + (t * heads + h) * head_dim, c, s, head_dim / 2);
  });
}

template <typename T>
void rotary_and_cache(T* qkv, const float* cos, const float* sin, PoolLayer pool, const int64_t* slots,
                      int64_t tokens, int64_t heads, int64_t head_dim, int64_t threads) {
  int64_t width = (heads + 2 * pool.kv_heads) * head_dim;
  for_each(tokens, threads_for(tokens * width, threads), [&](int64_t t) {
    const float *c = cos + t * head_dim / 2, *s = sin + t * head_dim / 2;
    T* query = qkv + t * width;
    const T *key = query + heads * head_dim, *value = key + pool.kv_heads * head_dim;
    for (int64_t h = 0; h < heads; h++) turn(query + h * head_dim, query + h * head_dim, c, s, head_dim / 2);
    for (int64_t h = 0; h < pool.kv_heads; h++) {
      T* to = pool.key<T>(slots[t], h, head_dim);
      turn(key + h * head_dim, to, c, s, head_dim / 2);
      memcpy(to + pool.value_offset(head_dim), value + h * head_dim, head_dim * sizeof(T));
    }
  });
}

template <typename T>
void reshape_and_cache(const T* key, const T* value, int64_t key_stride, int64_t value_stride, PoolLayer pool,
                       const int64_t* slots, int64_t tokens, int64_t head_dim, int64_t threads) {
  int64_t elements = 2 * tokens * pool.kv_heads * head_dim;
  for_each(tokens, threads_for(elements, threads), [&](int64_t t) {
    for (int64_t h = 0; h < pool.kv_heads; h++) {
      T* to = pool.key<T>(slots[t], h, head_dim);
      memcpy(to, key + t * key_stride + h * head_dim, head_dim * sizeof(T));
      memcpy(to + pool.value_offset(head_dim), value + t * value_stride + h * head_dim, head_dim * sizeof(T));
    }
  });
}

}  // namespace
}  // namespace kvhive

using namespace kvhive;

// x [tokens, heads, head_dim], dense but for its first stride; out dense; cos, sin [tokens, head_dim / 2].
KVHIVE_EXPORT void kvhive_rotary(int64_t dtype, const void* x, void* out, const float* cos, const float* sin,
                                 int64_t tokens, int64_t heads, int64_t head_dim, int64_t token_stride,
                                 int64_t threads) {
  if (dtype == FLOAT32)
    rotary((const float*)x, (float*)out, cos, sin, tokens, heads, head_dim, token_stride, threads);
  else
    rotary((const bf16*)x, (bf16*)out, cos, sin, tokens, heads, head_dim, token_stride, threads);
}

// qkv [tokens, heads + 2 * kv_heads, head_dim], dense; its queries are turned in place.
// Returns 1, having written nothing, when a slot lies outside the pool.
KVHIVE_EXPORT int kvhive_rotary_and_cache(int64_t dtype, void* qkv, const float* cos, const float* sin, void* pool,
                                          int64_t blocks, int64_t block_stride, int64_t kv_heads,
                                          int64_t block_size, const int64_t* slots, int64_t tokens, int64_t heads,
                                          int64_t head_dim, int64_t threads) {
  PoolLayer layer{(char*)pool, blocks, block_stride, kv_heads, block_size};
  if (!layer.has_all(slots, tokens)) return 1;
  if (dtype == FLOAT32)
    rotary_and_cache((float*)qkv, cos, sin, layer, slots, tokens, heads, head_dim, threads);
  else
    rotary_and_cache((bf16*)qkv, cos, sin, layer, slots, tokens, heads, head_dim, threads);
  return 0;
}

// key, value [tokens, kv_heads, head_dim], dense but for their first strides. Returns as above.
KVHIVE_EXPORT int kvhive_reshape_and_cache(int64_t dtype, const void* key, const void* value, int64_t key_stride,
                                           int64_t value_stride, void* pool, int64_t blocks, int64_t block_stride,
                                           int64_t kv_heads, int64_t block_size, const int64_t* slots,
                                           int64_t tokens, int64_t head_dim, int64_t threads) {
  PoolLayer layer{(char*)pool, blocks, block_stride, kv_heads, block_size};
  if (!layer.has_all(slots, tokens)) return 1;
  if (dtype == FLOAT32)
    reshape_and_cache((const float*)key, (const float*)value, key_stride, value_stride, layer, slots, tokens,
                      head_dim, threads);
  else
    reshape_and_cache((const bf16*)key, (const bf16*)value, key_stride, value_stride, layer, slots, tokens,
                      head_dim, threads);
  return 0;
}
