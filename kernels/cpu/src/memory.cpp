// Moving keys, values and blocks.
#include <cstring>

#include "dispatch.h"
#include "rows.h"

namespace quire {
namespace {

constexpr int64_t kParallelBytes = 1 << 16;

}  // namespace
}  // namespace quire

using namespace quire;

void quire_store_kv(const QuireCache* cache, const void* k, int64_t k_stride, const void* v, int64_t v_stride,
                    const int64_t* slots, int64_t tokens) {
  by_cache(*cache, [&](auto type, auto stored) {
    using T = typename decltype(type)::type;
    const Cache<typename decltype(stored)::type> memory(*cache);
    const int dim = memory.head_dim;
#pragma omp parallel for if (tokens * memory.kv_heads * dim * int64_t(sizeof(T)) >= kParallelBytes)
    for (int64_t t = 0; t < tokens; ++t) {
      if (slots[t] < 0) continue;
      auto* slot = memory.slot(slots[t]);
      for (int head = 0; head < memory.kv_heads; ++head) {
        store_row(static_cast<const T*>(k) + t * k_stride + head * dim, dim, slot + head * memory.head_stride);
        store_row(static_cast<const T*>(v) + t * v_stride + head * dim, dim,
                  slot + memory.values + head * memory.head_stride);
      }
    }
  });
}

void quire_copy_blocks(const void* source, void* target, int64_t bytes, const int64_t* from, const int64_t* to,
                       int64_t pairs) {
#pragma omp parallel for if (pairs * bytes >= kParallelBytes)
  for (int64_t i = 0; i < pairs; ++i)
    std::memcpy(static_cast<char*>(target) + to[i] * bytes, static_cast<const char*>(source) + from[i] * bytes, bytes);
}
