// The functions of the library that others of it call; what they take stands above each.
#pragma once

#include "attention_work.h"

KVHIVE_EXPORT void kvhive_rms_norm(int64_t dtype, int64_t weight_dtype, const void* x, void* residual,
                                   const void* weight, void* out, int64_t count, int64_t inner,
                                   int64_t outer_stride, int64_t inner_stride, int64_t hidden, float eps,
                                   int64_t threads);
KVHIVE_EXPORT void kvhive_linear(int64_t dtype, int64_t halves, const void* x, const void* weights,
                                 const void* bias, void* y, int64_t rows, int64_t inputs, int64_t outputs,
                                 int64_t threads);
KVHIVE_EXPORT int kvhive_rotary_and_cache(int64_t dtype, void* qkv, const float* cos, const float* sin, void* pool,
                                          int64_t blocks, int64_t block_stride, int64_t kv_heads,
                                          int64_t block_size, const int64_t* slots, int64_t tokens, int64_t heads,
                                          int64_t head_dim, int64_t threads);
KVHIVE_EXPORT void kvhive_attention(const kvhive::AttentionCall* call, const kvhive::Work* work, const void* query,
                                    const void* pool, void* out, float* scratch);
KVHIVE_EXPORT void kvhive_silu_and_mul(int64_t dtype, const void* gate_up, void* out, int64_t rows, int64_t width,
                                       int64_t threads);
KVHIVE_EXPORT void kvhive_gelu_tanh_and_mul(int64_t dtype, const void* gate_up, void* out, int64_t rows,
                                            int64_t width, int64_t threads);
