// Norms, rotary embedding and the gated activation, each one pass over its rows.
#include <algorithm>

#include "dispatch.h"
#include "memory.h"
#include "vec.h"

namespace quire {
namespace {

/// Below this many elements a second thread costs more than it saves.
constexpr int64_t kParallel = 1 << 14;

/// out = x / rms(x) * weight; rounded to T before the weight is applied, as the models' own code does. out may be x.
template <class T>
void normalize(const T* x, const T* weight, float eps, T* out, int columns) {
  V squares = zero();
  int c = 0;
  for (; c + W <= columns; c += W) {
    const V v = load(x + c);
    squares = fma(v, v, squares);
  }
  float sum = hsum(squares);
  for (; c < columns; ++c) sum += to_float(x[c]) * to_float(x[c]);
  const float scale = 1 / std::sqrt(sum / float(columns) + eps);
  for (c = 0; c + W <= columns; c += W)
    store(out + c, mul(rounded<T>(mul(load(x + c), set1(scale))), load(weight + c)));
  for (; c < columns; ++c) out[c] = from_float<T>(rounded<T>(to_float(x[c]) * scale) * to_float(weight[c]));
}

template <class T>
void add_to(T* residual, const T* x, int columns) {
  int c = 0;
  for (; c + W <= columns; c += W) store(residual + c, add(load(residual + c), load(x + c)));
  for (; c < columns; ++c) residual[c] = from_float<T>(to_float(residual[c]) + to_float(x[c]));
}

template <class T>
void gate(const T* gates, const T* ups, T* out, int columns) {
  int c = 0;
  for (; c + W <= columns; c += W) {
    const V g = load(gates + c);
    const V silu = div(g, add(set1(1), exp(sub(zero(), g))));
    store(out + c, mul(rounded<T>(silu), load(ups + c)));
  }
  for (; c < columns; ++c) {
    const float g = to_float(gates[c]);
    out[c] = from_float<T>(rounded<T>(g / (1 + std::exp(-g))) * to_float(ups[c]));
  }
}

/// Element i of the first half and element i of the second are a point that turns by position times frequency i.
template <class T>
void rotate(const T* x, const float* cos_sin, T* out, int dim) {
  const int half = dim / 2;
  int i = 0;
  for (; i + W <= half; i += W) {
    const V a = load(x + i), b = load(x + half + i), cos = load(cos_sin + i), sin = load(cos_sin + half + i);
    store(out + i, sub(mul(a, cos), mul(b, sin)));
    store(out + half + i, fma(a, sin, mul(b, cos)));
  }
  for (; i < half; ++i) {
    const float a = to_float(x[i]), b = to_float(x[half + i]), cos = cos_sin[i], sin = cos_sin[half + i];
    out[i] = from_float<T>(a * cos - b * sin);
    out[half + i] = from_float<T>(b * cos + a * sin);
  }
}

template <class T>
void rope_store(const QuireCache& memory, T* qkv, int64_t stride, const float* cos_sin, const int64_t* positions,
                const int64_t* slots, int64_t tokens, int heads, const T* q_norm, const T* k_norm, float eps) {
  const Cache<T> cache(memory);
  const int dim = cache.head_dim, kv_heads = cache.kv_heads;
#pragma omp parallel for if (tokens * (heads + 2 * kv_heads) * dim >= kParallel)
  for (int64_t t = 0; t < tokens; ++t) {
    T* row = qkv + t * stride;
    const float* turn = cos_sin + positions[t] * dim;
    for (int head = 0; head < heads; ++head, row += dim) {
      if (q_norm) normalize(row, q_norm, eps, row, dim);
      rotate(row, turn, row, dim);
    }
    if (slots[t] < 0) continue;
    T* slot = cache.slot(slots[t]);
    for (int head = 0; head < kv_heads; ++head, row += dim) {
      if (k_norm) normalize(row, k_norm, eps, row, dim);
      rotate(row, turn, slot + head * cache.head_stride, dim);
    }
    for (int head = 0; head < kv_heads; ++head, row += dim)
      std::copy_n(row, dim, slot + cache.values + head * cache.head_stride);
  }
}

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
  by_dtype(cache->dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    rope_store(*cache, static_cast<T*>(qkv), stride, cos_sin, positions, slots, tokens, heads,
               static_cast<const T*>(q_norm), static_cast<const T*>(k_norm), eps);
  });
}
