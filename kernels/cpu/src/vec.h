// One vector of floats, V, of W lanes, and what the kernels do with it; vec_avx512.h and vec_avx2.h implement it.
//
// load2/store2 move 2 W elements as two vectors in the lane order that is cheapest for their type: for bf16 a holds the
// even elements and b the odd ones, which takes a shift and a mask instead of permutes. Sums over elements do not mind,
// and accumulators filled from load2 are put back in order by store2.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "types.h"

namespace quire {

constexpr float kInf = __builtin_inff();
constexpr float kLog2e = 1.44269504088896341f;

/// The constants of splitmix64.
constexpr int64_t kGolden = int64_t(0x9E3779B97F4A7C15), kMix1 = int64_t(0xBF58476D1CE4E5B9),
                  kMix2 = int64_t(0x94D049BB133111EB);

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline float to_float(f16 x) { return _cvtsh_ss(x.bits); }

template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  if (std::isnan(x)) return {0x7fc0};
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <>
inline f16 from_float<f16>(float x) {
  return {uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
}

/// `x` as it reads back after being stored as T.
template <class T>
inline float rounded(float x) {
  return to_float(from_float<T>(x));
}

}  // namespace quire

#ifdef __AVX512F__
#include "vec_avx512.h"
#else
#include "vec_avx2.h"
#endif

namespace quire {

inline V exp(V x) { return exp2(mul(x, set1(kLog2e))); }

/// tanh: an odd polynomial near 0 (Cephes' tanhf), (e^2x - 1) / (e^2x + 1) elsewhere.
inline V tanh(V x) {
  const V bounded = max(min(x, set1(10.f)), set1(-10.f));
  const V e = exp2(mul(bounded, set1(2 * kLog2e)));
  const V far = div(sub(e, set1(1.f)), add(e, set1(1.f)));
  const V z = mul(x, x);
  V near = set1(-5.70498872745e-3f);
  near = fma(near, z, set1(2.06390887954e-2f));
  near = fma(near, z, set1(-5.37397155531e-2f));
  near = fma(near, z, set1(1.33314422036e-1f));
  near = fma(near, z, set1(-3.33332819422e-1f));
  near = fma(mul(near, z), x, x);
  return select_less(z, set1(0.625f * 0.625f), near, far);
}

/// `x` as it reads back after being stored as T.
template <class T>
inline V rounded(V x) {
  alignas(64) T stored[W];
  store(stored, x);
  return load(stored);
}
template <>
inline V rounded<float>(V x) {
  return x;
}

}  // namespace quire
