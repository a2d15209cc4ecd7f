// Norms, rotary embedding and the gated activation, each one pass over its rows.
#include "dispatch.h"
#include "rows.h"

namespace quire {
namespace {

/// Below this many elements a second thread costs more than it saves.
constexpr int64_t kParallel = 1 << 14;

}  // namespace
}  // namespace quire

using namespace quire;

void quire_rms_norm(int32_t dtype, const void* x, int64_t x_stride, void* residual, const void* weight, float eps,
                    void* out, int64_t rows, int32_t columns) {
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
#pragma omp parallel for if (rows * columns >= kParallel)
    for (int64_t r = 0; r < rows; ++r) {
      const T* from = static_cast<const T*>(x) + r * x_stride;
      if (residual) {
        T* sum = static_cast<T*>(residual) + r * columns;
        add_to(sum, from, columns);
        from = sum;
      }
      normalize(from, static_cast<const T*>(weight), eps, static_cast<T*>(out) + r * columns, columns);
    }
  });
}

void quire_silu_mul(int32_t dtype, const void* gate_up, int64_t stride, void* out, int64_t rows, int32_t columns) {
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
#pragma omp parallel for if (rows * columns >= kParallel)
    for (int64_t r = 0; r < rows; ++r) {
      const T* from = static_cast<const T*>(gate_up) + r * stride;
      gate(from, from + columns, static_cast<T*>(out) + r * columns, columns);
    }
  });
}

void quire_rope(int32_t dtype, void* x, int64_t stride, const float* cos_sin, const int64_t* positions, int64_t tokens,
                int32_t heads, int32_t head_dim) {
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
#pragma omp parallel for if (tokens * heads * head_dim >= kParallel)
    for (int64_t t = 0; t < tokens; ++t)
      for (int head = 0; head < heads; ++head) {
        T* row = static_cast<T*>(x) + t * stride + head * head_dim;
        rotate(row, cos_sin + positions[t] * head_dim, row, head_dim);
      }
  });
}

void quire_rope_store(const QuireCache* cache, void* qkv, int64_t stride, const float* cos_sin,
                      const int64_t* positions, const int64_t* slots, int64_t tokens, int32_t heads,
                      const void* q_norm, const void* k_norm, float eps) {
  by_cache(*cache, [&](auto type, auto stored) {
    using T = typename decltype(type)::type;
    const Cache<typename decltype(stored)::type> memory(*cache);
#pragma omp parallel for if (tokens * (heads + 2 * memory.kv_heads) * memory.head_dim >= kParallel)
    for (int64_t t = 0; t < tokens; ++t)
      rope_store(memory, static_cast<T*>(qkv) + t * stride, cos_sin, positions[t], slots[t], heads,
                 static_cast<const T*>(q_norm), static_cast<const T*>(k_norm), eps);
  });
}
