// The hashes of a chain of blocks: SHA-256( version | parent | tokens | extras ), every part after its length.
// What that means stands in block_hash.py.
#include <new>

#include "sha256.h"

namespace kvhive {
namespace {

constexpr int64_t LENGTH = 4, PADDING = 9;

// One message, padded, with room for a parent and tokens: blocks of a chain differ in nothing else.
class Message {
 public:
  Message(const uint8_t* version, int64_t version_bytes, int64_t token_bytes, int64_t extras_bytes)
      : token_bytes_(token_bytes) {
    parent_ = LENGTH + version_bytes + LENGTH;
    tokens_ = parent_ + SHA256_DIGEST + LENGTH;
    extras_ = tokens_ + token_bytes + LENGTH;
    int64_t length = extras_ + extras_bytes;
    blocks_ = (length + PADDING + SHA256_BLOCK - 1) / SHA256_BLOCK;
    bytes_ = new (std::nothrow) uint8_t[blocks_ * SHA256_BLOCK]();
    if (!bytes_) return;
    put_length(0, version_bytes);
    std::memcpy(bytes_ + LENGTH, version, version_bytes);
    put_length(parent_ - LENGTH, SHA256_DIGEST);
    put_length(tokens_ - LENGTH, token_bytes);
    put_length(extras_ - LENGTH, extras_bytes);
    bytes_[length] = 0x80;
    uint64_t bits = uint64_t(length) * 8;
    store_big_endian(bytes_ + blocks_ * SHA256_BLOCK - 8, uint32_t(bits >> 32));
    store_big_endian(bytes_ + blocks_ * SHA256_BLOCK - 4, uint32_t(bits));
  }
  ~Message() { delete[] bytes_; }
  Message(const Message&) = delete;

  bool has_memory() const { return bytes_; }
  uint8_t* extras() { return bytes_ + extras_; }

  template <typename Compress>
  void hash(const uint8_t* parent, const uint8_t* tokens, uint8_t* digest, Compress compress) {
    std::memcpy(bytes_ + parent_, parent, SHA256_DIGEST);
    std::memcpy(bytes_ + tokens_, tokens, token_bytes_);
    uint32_t state[8];
    std::memcpy(state, INITIAL_STATE, sizeof(state));
    compress(state, bytes_, blocks_);
    for (int i = 0; i < 8; i++) store_big_endian(digest + 4 * i, state[i]);
  }

 private:
  // As the identity has lengths: little-endian.
  void put_length(int64_t at, int64_t length) {
    for (int i = 0; i < LENGTH; i++) bytes_[at + i] = uint8_t(length >> (8 * i));
  }

  int64_t parent_, tokens_, token_bytes_, extras_, blocks_;
  uint8_t* bytes_;
};

}  // namespace
}  // namespace kvhive

// Write the 32 bytes of each of `count` blocks of `token_bytes` bytes, the first one under `parent` (32 bytes)
// and with the extras. Returns 0, or 1 where there is no memory for two messages. Without instructions for it,
// or where `portably` is not 0, in plain C++.
extern "C" __attribute__((visibility("default"))) int kvhive_block_chain(
    const uint8_t* version, int64_t version_bytes, const uint8_t* parent, const uint8_t* tokens,
    int64_t token_bytes, int64_t count, const uint8_t* extras, int64_t extras_bytes, int portably,
    uint8_t* digests) {
  using namespace kvhive;
  static const bool by_instructions = has_sha_instructions();
  auto compress = by_instructions && !portably ? compress_by_instructions : compress_portably;
  Message first(version, version_bytes, token_bytes, extras_bytes);
  Message later(version, version_bytes, token_bytes, 0);
  if (!first.has_memory() || !later.has_memory()) return 1;
  std::memcpy(first.extras(), extras, extras_bytes);
  for (int64_t i = 0; i < count; i++, tokens += token_bytes, digests += SHA256_DIGEST) {
    (i ? later : first).hash(parent, tokens, digests, compress);
    parent = digests;
  }
  return 0;
}
