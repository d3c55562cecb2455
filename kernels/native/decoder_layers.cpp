// The layers of a decoder in one call: what they would compute one operator at a time, without the way through
// Python between them, which a few rows would wait for longer than for some of the operators.
#include <cstring>

#include "exports.h"

namespace kvhive {
namespace {

// Mirrored by library.py, as are the next three, field by field.
struct LinearLayer {
  const void *weights, *bias;
  int64_t halves, inputs, outputs;
};

// Norms that a model does not have are null. `next_norm` is the first of the next layer, or the model's last.
struct DecoderLayer {
  LinearLayer qkv, output, gate_up, down;
  const void *query_norm, *key_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm, *next_norm;
  int64_t rope, attention;  // which of the step's
};

struct Attention {
  const AttentionCall* call;
  const Work* work;
  float* scratch;
};

struct Step {
  const DecoderLayer* layers;
  const Attention* attentions;
  const float* const* angles;  // of each kind of rotary embedding: cosines, then sines
  const int64_t *slots, *rows;  // `rows` are those that are asked for, in their order
  char *hidden, *residual, *qkv, *wide, *gated;  // [tokens, ...]; `wide` as the widest that a layer writes there
  char* pool;
  int64_t row_count;       // `tokens` where the last layer is to compute all
  int64_t rows_attention;  // that of the rows alone
  int64_t layer_count, tokens, blocks, block_stride, layer_stride, block_size;  // strides in elements
  int64_t heads, kv_heads, head_dim, hidden_size;
  int64_t dtype, norm_dtype, gelu, threads;
  double eps;

  int64_t itemsize() const { return dtype == FLOAT32 ? 4 : 2; }
};

class Decoder {
 public:
  explicit Decoder(const Step& step) : step(step), tokens(step.tokens) {}

  // Returns 1 when a slot lies outside the pool: the layers before wrote where they should, the others nothing.
  int run() {
    for (int64_t index = 0; index < step.layer_count; index++)
      if (run_layer(index)) return 1;
    return 0;
  }

 private:
  const Step& step;
  int64_t tokens;  // that a layer computes now

  int run_layer(int64_t index) {
    const DecoderLayer& layer = step.layers[index];
    char* pool = step.pool + index * step.layer_stride * step.itemsize();
    multiply(layer.qkv, step.hidden, step.qkv);
    if (layer.query_norm) norm_heads(layer.query_norm, 0, step.heads);
    if (layer.key_norm) norm_heads(layer.key_norm, step.heads, step.kv_heads);
    const float* const* angles = step.angles + 2 * layer.rope;
    if (kvhive_rotary_and_cache(step.dtype, step.qkv, angles[0], angles[1], pool, step.blocks, step.block_stride,
                                step.kv_heads, step.block_size, step.slots, tokens, step.heads, step.head_dim,
                                step.threads))
      return 1;
    bool last = index + 1 == step.layer_count && step.row_count < tokens;
    if (last) keep_rows();
    if (!tokens) return 0;
    const Attention& attention = step.attentions[last ? step.rows_attention : layer.attention];
    kvhive_attention(attention.call, attention.work, step.qkv, pool, step.wide, attention.scratch);
    multiply(layer.output, step.wide, step.hidden);
    norm(layer.post_attention_norm, layer.mlp_norm);
    multiply(layer.gate_up, step.hidden, step.wide);
    auto gate = step.gelu ? kvhive_gelu_tanh_and_mul : kvhive_silu_and_mul;
    gate(step.dtype, step.wide, step.gated, tokens, layer.down.inputs, step.threads);
    multiply(layer.down, step.gated, step.hidden);
    norm(layer.post_mlp_norm, layer.next_norm);
    return 0;
  }

  // What is asked for moves to the front, as if there were nothing else; keys and values are in the pool.
  void keep_rows() {
    int64_t query = step.heads * step.head_dim * step.itemsize(), row = step.hidden_size * step.itemsize();
    int64_t stride = query + 2 * step.kv_heads * step.head_dim * step.itemsize();
    for (int64_t i = 0; i < step.row_count; i++) {
      memmove(step.qkv + i * stride, step.qkv + step.rows[i] * stride, query);
      memmove(step.residual + i * row, step.residual + step.rows[i] * row, row);
    }
    tokens = step.row_count;
  }

  void multiply(const LinearLayer& layer, const char* x, char* y) const {
    kvhive_linear(step.dtype, layer.halves, x, layer.weights, layer.bias, y, tokens, layer.inputs, layer.outputs,
                  step.threads);
  }

  // What a half of the layer gave: normed where the model says so, added to the residual, normed for the next.
  void norm(const void* own, const void* next) const {
    if (own) rms_norm(step.hidden, nullptr, own, step.hidden, tokens, step.hidden_size, step.threads);
    rms_norm(step.hidden, step.residual, next, step.hidden, tokens, step.hidden_size, step.threads);
  }

  // Heads [first, first + count) of all tokens, in place.
  void norm_heads(const void* weight, int64_t first, int64_t count) const {
    int64_t head = step.head_dim * step.itemsize(), row = (step.heads + 2 * step.kv_heads) * head;
    for_each(tokens, threads_for(tokens * count * step.head_dim, step.threads), [&](int64_t token) {
      char* heads = step.qkv + token * row + first * head;
      rms_norm(heads, nullptr, weight, heads, count, step.head_dim, 1);
    });
  }

  void rms_norm(void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t width,
                int64_t threads) const {
    kvhive_rms_norm(step.dtype, step.norm_dtype, x, residual, weight, out, rows, 1, width, 0, width,
                    float(step.eps), threads);
  }
};

}  // namespace
}  // namespace kvhive

using namespace kvhive;

// `hidden` holds the normed input of the first layer and `residual` the input itself; afterwards, in the rows that
// are asked for, the normed output of the last one, and the residual before that norm.
KVHIVE_EXPORT int kvhive_decoder_layers(const Step* step) { return Decoder(*step).run(); }
