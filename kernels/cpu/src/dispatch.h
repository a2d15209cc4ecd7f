// From a dtype at run time to a type at compile time.
#pragma once
#include "kernels.h"
#include "types.h"

namespace quire {

template <class T>
struct Type {
  using type = T;
};

/// Calls f(Type<T>{}) with the T of `dtype`.
template <class F>
inline void by_dtype(int32_t dtype, F f) {
  switch (dtype) {
    case kFloat32:
      return f(Type<float>{});
    case kBFloat16:
      return f(Type<bf16>{});
    default:
      return f(Type<f16>{});
  }
}

/// Calls f(Type<T>{}, Type<S>{}) with the T of keys, values and queries, and the S that `cache` keeps them as.
template <class F>
inline void by_cache(const QuireCache& cache, F f) {
  by_dtype(cache.dtype, [&](auto type) {
    if (cache.int8)
      f(type, Type<i8>{});
    else
      f(type, type);
  });
}

}  // namespace quire
