// What is done to single rows: norms, rotary embedding, the gated activation.
#pragma once
#include <algorithm>

#include "memory.h"
#include "vec.h"

namespace quire {

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

/// Puts a row of keys or values where KV memory keeps it.
template <class T>
void store_row(const T* x, int dim, T* to) {
  std::copy_n(x, dim, to);
}

/// Rounds the row to multiples of a scale, its largest element being 127 of them.
template <class T>
void store_row(const T* x, int dim, i8* to) {
  V largest = zero();
  int d = 0;
  for (; d + W <= dim; d += W) largest = max(largest, abs(load(x + d)));
  float bound = hmax(largest);
  for (; d < dim; ++d) bound = std::max(bound, std::abs(to_float(x[d])));
  const float scale = bound / 127, divisor = scale > 0 ? scale : 1;
  for (d = 0; d + W <= dim; d += W) store(to + d, div(load(x + d), set1(divisor)));
  for (; d < dim; ++d) to[d].value = int8_t(std::clamp(std::nearbyint(to_float(x[d]) / divisor), -127.f, 127.f));
  std::memcpy(to + dim, &scale, sizeof scale);
}

/// A token's queries, keys and values [heads + 2 kv_heads, head_dim]: norms queries and keys where weights are given,
/// rotates queries in place and keys on their way into the cache, and stores values.
template <class T, class S>
void rope_store(const Cache<S>& cache, T* row, const float* cos_sin, int64_t position, int64_t slot, int heads,
                const T* q_norm, const T* k_norm, float eps) {
  const int dim = cache.head_dim, kv_heads = cache.kv_heads;
  const float* turn = cos_sin + position * dim;
  for (int head = 0; head < heads; ++head, row += dim) {
    if (q_norm) normalize(row, q_norm, eps, row, dim);
    rotate(row, turn, row, dim);
  }
  if (slot < 0) return;
  S* to = cache.slot(slot);
  for (int head = 0; head < kv_heads; ++head, row += dim) {
    if (k_norm) normalize(row, k_norm, eps, row, dim);
    if constexpr (kScaled<S>) {
      rotate(row, turn, row, dim);
      store_row(row, dim, to + head * cache.head_stride);
    } else {
      rotate(row, turn, to + head * cache.head_stride, dim);
    }
  }
  for (int head = 0; head < kv_heads; ++head, row += dim)
    store_row(row, dim, to + cache.values + head * cache.head_stride);
}

}  // namespace quire
