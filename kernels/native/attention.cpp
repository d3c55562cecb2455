// Paged attention: decode and prefill of a ragged batch by one algorithm.
//
// A piece of work is some queries of one sequence with the heads that share a KV head. It packs a tile of keys
// once, for all of them, and keeps a running softmax per row (Milakov and Gimelshein 2018, arXiv 1805.02867).
#include <type_traits>

#include "attention_work.h"
#include "parallel.h"

namespace kvhive {
namespace {

constexpr int64_t CACHE_LINE = 64;

// A thread's own memory, laid out in a scratch buffer.
struct Scratch {
  float *query, *out, *split_out, *keys, *values;
  Softmax *rows, *split_rows;

  static int64_t floats_for(const AttentionCall& call, int64_t rows) {
    int64_t tile = TILE * call.width();
    return aligned(rows * (call.head_dim + 2 * call.width() + 4)) + 2 * tile;
  }
  static int64_t aligned(int64_t count) { return (count + 15) / 16 * 16; }

  Scratch(const AttentionCall& call, int64_t most_rows, float* memory) {
    int64_t width = call.width();
    keys = memory;
    values = keys + TILE * width;
    out = values + TILE * width;
    split_out = out + most_rows * width;
    query = split_out + most_rows * width;
    rows = (Softmax*)(query + most_rows * call.head_dim);
    split_rows = rows + most_rows;
  }
};

// Sums of one split join those of the splits before it. A split that a row does not see changes no bit.
void join(Softmax& row, float* out, const Softmax& split, const float* split_out, int64_t width, float to_log2) {
  float largest = split.largest > row.largest ? split.largest : row.largest;
  if (largest == NOTHING && split.sum == 0) return;  // not so where all its scores are NaN
  float exponents[LANES] = {row.largest - largest, split.largest - largest};
  floats factors = exp2_of_negative(load(exponents) * broadcast(to_log2));
  for (int64_t d = 0; d < width; d += LANES)
    store(out + d, fma(load(split_out + d), broadcast(factors[1]), load(out + d) * broadcast(factors[0])));
  row.sum = row.sum * factors[0] + split.sum * factors[1];
  row.largest = largest;
}

template <typename T>
class Attention {
 public:
  Attention(const AttentionCall& call, const void* query, const void* pool, void* out)
      : call(call), scaling{float(call.scale), float(call.softcap)}, query((const T*)query), pool((const T*)pool),
        out((T*)out) {}

  // All that a piece sees: its result goes to `out`, or the sums of its split to `partial`.
  void compute(const Piece& piece, const Scratch& scratch, float* partial_out, Softmax* partial_rows) {
    int64_t width = call.width(), rows = piece.count * call.group();
    Span span = span_of(call, piece);
    take_queries(piece, scratch.query);
    if (piece.split >= 0) {
      span.begin = std::max(span.begin, piece.split * SPLIT);
      span.end = std::min(span.end, (piece.split + 1) * SPLIT);
      compute_split(piece, span, scratch, partial_out + piece.partial * width, partial_rows + piece.partial);
      return;
    }
    clear(scratch.out, scratch.rows, rows);
    for (int64_t begin = span.begin; begin < span.end;) {
      int64_t end = std::min(span.end, (begin / SPLIT + 1) * SPLIT);
      compute_split(piece, {begin, end}, scratch, scratch.split_out, scratch.split_rows);
      for (int64_t r = 0; r < rows; r++)
        join(scratch.rows[r], scratch.out + r * width, scratch.split_rows[r], scratch.split_out + r * width,
             width, scaling.to_log2());
      begin = end;
    }
    for (int64_t r = 0; r < rows; r++) write(piece, r, scratch.rows[r], scratch.out + r * width);
  }

  // The splits of a piece, computed before, become its result.
  void join_splits(const Joined& joined, const float* partial_out, const Softmax* partial_rows) {
    int64_t width = call.width(), rows = joined.piece.count * call.group();
    for (int64_t r = 0; r < rows; r++) {
      float sums[MOST_HEAD_DIM] = {};
      Softmax row{NOTHING, 0};
      for (int64_t at = joined.partial + r; at < joined.partial + joined.splits * rows; at += rows)
        join(row, sums, partial_rows[at], partial_out + at * width, width, scaling.to_log2());
      write(joined.piece, r, row, sums);
    }
  }

 private:
  const AttentionCall& call;
  Scaling scaling;
  const T *query, *pool;
  T* out;

  int64_t row_offset(const Piece& piece, int64_t r, int64_t stride) const {
    int64_t token = call.query_starts[piece.sequence] + piece.first + r / call.group();
    return token * stride + (piece.kv_head * call.group() + r % call.group()) * call.head_dim;
  }

  void clear(float* sums, Softmax* rows, int64_t count) const {
    memset(sums, 0, count * call.width() * sizeof(float));
    for (int64_t r = 0; r < count; r++) rows[r] = {NOTHING, 0};
  }

  void take_queries(const Piece& piece, float* to) const {
    for (int64_t r = 0; r < piece.count * call.group(); r++) {
      const T* from = query + row_offset(piece, r, call.query_stride);
      for (int64_t d = 0; d < call.head_dim; d += LANES) {
        int count = lanes(d, call.head_dim);
        store(to + r * call.head_dim + d, load(from + d, count), count);
      }
    }
  }

  void write(const Piece& piece, int64_t r, const Softmax& row, const float* sums) {
    T* to = out + row_offset(piece, r, call.heads * call.head_dim);
    floats factor = broadcast(1.0f / row.sum);
    for (int64_t d = 0; d < call.head_dim; d += LANES)
      store(to + d, load(sums + d) * factor, lanes(d, call.head_dim));
  }

  // Where the keys and values of a tile lie. What may not be read stands as zeros, which masked scores and
  // weights make exactly nothing.
  struct Tile {
    int64_t begin;
    Visible readable;
    const T *keys[TILE], *values[TILE];
  };

  void compute_split(const Piece& piece, Span span, const Scratch& scratch, float* sums, Softmax* rows) {
    clear(sums, rows, piece.count * call.group());
    Tile tiles[2];
    locate(piece, span, span.begin / TILE * TILE, tiles[0]);
    for (int i = 0; tiles[i].begin < span.end; i = 1 - i) {
      locate(piece, span, tiles[i].begin + TILE, tiles[1 - i]);
      pack_keys(tiles[i], tiles[1 - i], scratch.keys);
      compute_tile(piece, tiles[i], scratch, sums, rows);
    }
  }

  // On the way, ask the memory for what is needed next: blocks lie anywhere, and no hardware foresees where.
  void pack_keys(const Tile& tile, const Tile& next, float* panels) const {
    int64_t bytes = call.head_dim * sizeof(T);
    for (int t = tile.readable.first / 8 * 8; t < tile.readable.last; t += 8) {
      for (int i = t; i < t + 8; i++)
        for (int64_t at = 0; at < bytes; at += CACHE_LINE) {
          __builtin_prefetch((const char*)tile.values[i] + at, 0, 2);
          __builtin_prefetch((const char*)next.keys[i] + at, 0, 2);
        }
      pack_eight_keys(tile.keys + t, t, int(call.head_dim), panels);
    }
  }

  void compute_tile(const Piece& piece, const Tile& tile, const Scratch& scratch, float* sums, Softmax* rows) {
    int64_t count = piece.count * call.group(), width = call.width();
    bool direct = width == call.head_dim && (sizeof(T) == sizeof(float) || count <= MOST_ROWS);
    const float* packed[TILE];
    if (!direct)
      for (int t = tile.readable.first; t < tile.readable.last; t++) {
        packed[t] = scratch.values + t * width;
        for (int64_t d = 0; d < width; d += LANES)
          store(scratch.values + t * width + d, load(tile.values[t] + d, lanes(d, call.head_dim)));
      }
    Position first{piece, tile.begin, tile.readable};
    if (direct)
      attend(first, count, tile.values, scratch, sums, rows);
    else
      attend(first, count, packed, scratch, sums, rows);
  }

  // Which tile it is, for which piece, and what of it may be read.
  struct Position {
    const Piece& piece;
    int64_t tile;
    Visible readable;
  };

  template <typename V>
  void attend(const Position& where, int64_t count, const V* const* values, const Scratch& scratch, float* sums,
              Softmax* softmax) const {
    int head_dim = int(call.head_dim), width = int(call.width());
    in_groups(count, [&](auto rows, int64_t at) {
      float scores[rows * TILE], decay[rows];
      Visible visible[rows], any = see(where, at, rows, visible);
      if (any.first >= any.last) return;
      multiply_keys<rows>(scratch.query + at * head_dim, head_dim, scratch.keys, any, scores);
      weigh<rows>(scores, visible, scaling, softmax + at, decay);
      add_values<rows>(scores, values, any.first, any.last, decay, sums + at * width, width);
    });
  }

  // Call `work(rows, at)` for groups of as many rows as the registers have room for.
  template <typename F>
  static void in_groups(int64_t count, F work) {
    for (int64_t at = 0; at < count;) {
      int64_t left = count - at, rows = left >= 9 || left == 6 ? 6 : left >= 7 ? 4 : left == 5 ? 3 : left;
      switch (rows) {
        case 6: work(std::integral_constant<int, 6>(), at); break;
        case 4: work(std::integral_constant<int, 4>(), at); break;
        case 3: work(std::integral_constant<int, 3>(), at); break;
        case 2: work(std::integral_constant<int, 2>(), at); break;
        default: work(std::integral_constant<int, 1>(), at);
      }
      at += rows;
    }
  }

  // What each of some rows sees of the tile, and what any of them does.
  Visible see(const Position& where, int64_t first_row, int rows, Visible* visible) const {
    int64_t queries = call.query_starts[where.piece.sequence + 1] - call.query_starts[where.piece.sequence];
    int64_t position = call.context_lengths[where.piece.sequence] - queries + where.piece.first;
    Visible any{TILE, 0};
    for (int i = 0; i < rows; i++) {
      int64_t own = position + (first_row + i) / call.group() - where.tile;
      int64_t oldest = call.window ? own + 1 - call.window : 0;
      visible[i].first = int(std::max<int64_t>(oldest, where.readable.first));
      visible[i].last = int(std::min<int64_t>(own + 1, where.readable.last));
      if (visible[i].first < visible[i].last)
        any = {std::min(any.first, visible[i].first), std::max(any.last, visible[i].last)};
    }
    return any;
  }

  // Find the tile that begins there, block by block; nothing of it is readable past the span's end.
  void locate(const Piece& piece, Span span, int64_t begin, Tile& tile) const {
    static const T nothing[MOST_HEAD_DIM] = {};
    tile.begin = begin;
    tile.readable.first = int(std::max<int64_t>(span.begin - begin, 0));
    tile.readable.last = int(std::max<int64_t>(std::min<int64_t>(span.end - begin, TILE), 0));
    std::fill_n(tile.keys, TILE, nothing);
    std::fill_n(tile.values, TILE, nothing);
    const int32_t* table = call.block_tables + piece.sequence * call.table_width;
    int64_t plane = call.block_size * call.head_dim, value_offset = call.kv_heads * plane;
    for (int t = tile.readable.first; t < tile.readable.last;) {
      int64_t block = (begin + t) / call.block_size, inside = (begin + t) % call.block_size;
      const T* key = pool + table[block] * call.block_stride + piece.kv_head * plane + inside * call.head_dim;
      int last = int(std::min<int64_t>(tile.readable.last, t + call.block_size - inside));
      for (; t < last; t++, key += call.head_dim) {
        tile.keys[t] = key;
        tile.values[t] = key + value_offset;
      }
    }
  }
};

template <typename T>
void attend(const AttentionCall& call, const Work& work, const void* query, const void* pool, void* out,
            float* scratch) {
  Attention<T> attention(call, query, pool, out);
  int64_t per_thread = Scratch::floats_for(call, work.rows);
  float* partial_out = scratch + per_thread * work.threads;
  Softmax* partial_rows = (Softmax*)(partial_out + work.partial_rows * call.width());
  int64_t pieces = work.pieces.size(), joined = work.joined.size();
  int threads = int(work.threads);
  for_pieces(pieces, threads, [&](int64_t i, int thread) {
    Scratch own(call, work.rows, scratch + thread * per_thread);
    attention.compute(work.pieces[i], own, partial_out, partial_rows);
  });
  for_pieces(joined, threads, [&](int64_t i, int) {
    attention.join_splits(work.joined[i], partial_out, partial_rows);
  });
}

}  // namespace
}  // namespace kvhive

using namespace kvhive;

// Cut the work once; every layer of a step uses it. The pointer is given back to kvhive_attention_forget.
KVHIVE_EXPORT Work* kvhive_attention_divide(const AttentionCall* call) { return new Work(divide(*call)); }

KVHIVE_EXPORT void kvhive_attention_forget(Work* work) { delete work; }

// Floats of scratch that a call needs.
KVHIVE_EXPORT int64_t kvhive_attention_scratch(const AttentionCall* call, const Work* work) {
  return Scratch::floats_for(*call, work->rows) * work->threads + work->partial_rows * (call->width() + 2);
}

KVHIVE_EXPORT void kvhive_attention(const AttentionCall* call, const Work* work, const void* query,
                                    const void* pool, void* out, float* scratch) {
  if (call->dtype == FLOAT32)
    attend<float>(*call, *work, query, pool, out, scratch);
  else
    attend<bf16>(*call, *work, query, pool, out, scratch);
}
