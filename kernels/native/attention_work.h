// What one call of attention is asked for, and how it is cut into pieces for the threads.
//
// How it is cut never changes a bit: a row sums tile by tile within a split, and split by split, in that order,
// whether one thread computes all of them or several do.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_tile.h"
#include "parallel.h"

namespace kvhive {

// Positions whose sums are formed on their own before they join the row's; a multiple of TILE.
constexpr int64_t SPLIT = 256;
// Rows (queries times the heads that share a KV head) that use a packed tile before it is given up.
constexpr int64_t PIECE_ROWS = 192;
constexpr int64_t LEAST_PIECE_ROWS = 24;
// Rows above which a piece is never cut by splits: its sums would be more memory than the pool it reads.
constexpr int64_t MOST_SPLIT_ROWS = 32;
// Pieces per thread that make an even load likely.
constexpr int64_t PIECES_PER_THREAD = 4;

// Mirrored by library.py, field by field.
struct AttentionCall {
  const int32_t* block_tables;
  const int32_t* query_starts;
  const int32_t* context_lengths;
  int64_t sequences, table_width, block_size;
  int64_t heads, kv_heads, head_dim;
  int64_t query_stride;  // elements from one token's queries to the next's
  int64_t block_stride;  // elements from one block of the pool to the next
  int64_t window;        // 0 for none
  int64_t dtype, threads;
  double scale, softcap;  // softcap 0 for none

  int64_t group() const { return heads / kv_heads; }
  // Rows of scratch are padded to whole vectors.
  int64_t width() const { return (head_dim + LANES - 1) / LANES * LANES; }
};

// Queries [first, first + count) of a sequence, for one KV head: over all they see, or over one split of it.
struct Piece {
  int32_t sequence, kv_head;
  int32_t first, count;
  int32_t split;    // -1 for all
  int64_t partial;  // where the sums of the split go, in rows

  int64_t cost = 0;
};

// The splits of one piece, whose sums become its result.
struct Joined {
  Piece piece;
  int64_t splits, partial;
};

struct Span {
  int64_t begin, end;
};

// Positions that at least one of the queries sees.
inline Span span_of(const AttentionCall& call, const Piece& piece) {
  int64_t queries = call.query_starts[piece.sequence + 1] - call.query_starts[piece.sequence];
  int64_t position = call.context_lengths[piece.sequence] - queries + piece.first;
  int64_t oldest = call.window ? std::max<int64_t>(0, position - call.window + 1) : 0;
  return {oldest, position + piece.count};
}

struct Work {
  std::vector<Piece> pieces;
  std::vector<Joined> joined;
  int64_t threads = 1;
  int64_t rows = 0;          // of the largest piece
  int64_t partial_rows = 0;  // of all splits
};

inline std::vector<Piece> cut_queries(const AttentionCall& call, int64_t most_rows) {
  int32_t most = int32_t(std::max<int64_t>(1, most_rows / call.group()));
  std::vector<Piece> pieces;
  for (int32_t s = 0; s < call.sequences; s++) {
    int32_t queries = call.query_starts[s + 1] - call.query_starts[s];
    for (int32_t first = 0; first < queries; first += most)
      for (int32_t head = 0; head < call.kv_heads; head++)
        pieces.push_back({s, head, first, std::min(most, queries - first), -1, 0});
  }
  return pieces;
}

inline int useful_threads(const AttentionCall& call, const std::vector<Piece>& pieces) {
  int64_t elements = 0;
  for (const Piece& piece : pieces) {
    Span span = span_of(call, piece);
    elements += (span.end - span.begin) * piece.count * call.group() * call.head_dim;
  }
  return threads_for(elements, call.threads);
}

inline Work divide(const AttentionCall& call) {
  int64_t most_rows = PIECE_ROWS;
  std::vector<Piece> whole = cut_queries(call, most_rows);
  Work work;
  work.threads = useful_threads(call, whole);
  int64_t enough = work.threads > 1 ? PIECES_PER_THREAD * work.threads : 1;
  while (int64_t(whole.size()) < enough && most_rows > LEAST_PIECE_ROWS)
    whole = cut_queries(call, most_rows /= 2);
  bool few = int64_t(whole.size()) < enough;
  for (Piece piece : whole) {
    Span span = span_of(call, piece);
    int64_t rows = piece.count * call.group();
    int64_t first_split = span.begin / SPLIT, splits = (span.end - 1) / SPLIT + 1 - first_split;
    work.rows = std::max(work.rows, rows);
    if (!few || splits == 1 || rows > MOST_SPLIT_ROWS) {
      piece.cost = (span.end - span.begin) * rows;
      work.pieces.push_back(piece);
      continue;
    }
    work.joined.push_back({piece, splits, work.partial_rows});
    for (int64_t i = 0; i < splits; i++) {
      piece.split = int32_t(first_split + i);
      piece.partial = work.partial_rows;
      piece.cost = SPLIT * rows;
      work.pieces.push_back(piece);
      work.partial_rows += rows;
    }
  }
  // The longest first, so that no thread ends with one that the others wait for.
  std::stable_sort(work.pieces.begin(), work.pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
  return work;
}

}  // namespace kvhive
