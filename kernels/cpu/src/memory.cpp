// Moving keys, values and blocks: copies of whole rows, whatever their type.
#include "memory.h"

#include <cstring>

namespace quire {
namespace {

constexpr int64_t kParallelBytes = 1 << 16;

/// A row of `head_dim` elements is copied as bytes: Cache<char> with the row's size as its head_dim.
QuireCache as_bytes(const QuireCache& cache) {
  QuireCache bytes = cache;
  bytes.head_dim *= cache.dtype == kFloat32 ? 4 : 2;
  return bytes;
}

}  // namespace
}  // namespace quire

using namespace quire;

void quire_store_kv(const QuireCache* cache, const void* k, int64_t k_stride, const void* v, int64_t v_stride,
                    const int64_t* slots, int64_t tokens) {
  const Cache<char> memory(as_bytes(*cache));
  const int64_t row = memory.head_dim, element = row / cache->head_dim;
#pragma omp parallel for if (tokens * memory.kv_heads * row >= kParallelBytes)
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] < 0) continue;
    char* slot = memory.slot(slots[t]);
    const char* key = static_cast<const char*>(k) + t * k_stride * element;
    const char* value = static_cast<const char*>(v) + t * v_stride * element;
    for (int head = 0; head < memory.kv_heads; ++head) {
      std::memcpy(slot + head * memory.head_stride, key + head * row, row);
      std::memcpy(slot + memory.values + head * memory.head_stride, value + head * row, row);
    }
  }
}

void quire_copy_blocks(const void* source, void* target, int64_t bytes, const int64_t* from, const int64_t* to,
                       int64_t pairs) {
#pragma omp parallel for if (pairs * bytes >= kParallelBytes)
  for (int64_t i = 0; i < pairs; ++i)
    std::memcpy(static_cast<char*>(target) + to[i] * bytes, static_cast<const char*>(source) + from[i] * bytes, bytes);
}
