// V on AVX2 with FMA and F16C.
#pragma once

namespace quire {

using V = __m256;
constexpr int W = 8;

inline V zero() { return _mm256_setzero_ps(); }
inline V set1(float x) { return _mm256_set1_ps(x); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V div(V a, V b) { return _mm256_div_ps(a, b); }
inline V abs(V x) { return _mm256_andnot_ps(set1(-0.f), x); }
inline V max(V a, V b) { return _mm256_max_ps(a, b); }
inline V min(V a, V b) { return _mm256_min_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }

inline float hmax(V x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline float hsum(V x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline V select_less(V x, V y, V yes, V no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, y, _CMP_LT_OQ)); }

/// Lanes begin .. end - 1 of x, `fill` in the others.
inline V keep(V x, int begin, int end, float fill) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i kept = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane),
                                           _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
  return _mm256_blendv_ps(set1(fill), x, _mm256_castsi256_ps(kept));
}

inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline V load(const bf16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline V load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline V load(const i8* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}

/// Each lane's bits rounded to the nearest bf16, ties to even, in the upper half; the lower half is rubbish.
inline __m256i bf16_bits(V x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), nan);
}

inline void store(float* p, V x) { _mm256_storeu_ps(p, x); }
inline void store(bf16* p, V x) {
  const __m256i low = _mm256_srli_epi32(bf16_bits(x), 16);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
}
inline void store(f16* p, V x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

/// Rounds to the nearest integer, ties to even, and to what fits.
inline void store(i8* p, V x) {
  const __m256i whole = _mm256_cvtps_epi32(x);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}

struct Two {
  V a, b;
};

template <class T>
inline Two load2(const T* p) {
  return {load(p), load(p + W)};
}
inline Two load2(const bf16* p) {
  const __m256i both = _mm256_loadu_si256((const __m256i*)p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000))))};
}

template <class T>
inline void store2(T* p, Two x) {
  store(p, x.a);
  store(p + W, x.b);
}
inline void store2(bf16* p, Two x) {
  const __m256i odd = _mm256_and_si256(bf16_bits(x.b), _mm256_set1_epi32(int(0xffff0000)));
  _mm256_storeu_si256((__m256i*)p, _mm256_or_si256(_mm256_srli_epi32(bf16_bits(x.a), 16), odd));
}

/// Lane i of the result is the sum over the lanes of x[i].
inline V hsums(const V (&x)[W]) {
  const V a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const V b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

/// 2^x: the power of the nearest integer times a polynomial of the rest (Cephes' exp2f). 0 far below 0, so for -inf;
/// infinite from about 127.5 on.
inline V exp2(V x) {
  const V bounded = min(max(x, set1(-126.f)), set1(128.f));
  const V n = _mm256_round_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const V r = sub(bounded, n);
  V p = set1(1.535336188319500e-4f);
  p = fma(p, r, set1(1.339887440266574e-3f));
  p = fma(p, r, set1(9.618437357674640e-3f));
  p = fma(p, r, set1(5.550332471162809e-2f));
  p = fma(p, r, set1(2.402264791363012e-1f));
  p = fma(p, r, set1(6.931472028550421e-1f));
  p = fma(p, r, set1(1.f));
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  const V power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  return select_less(x, set1(-126.f), zero(), mul(p, power));
}

/// W numbers of 32 bits, and what products of small integers need of them.
using I = __m256i;

inline I set1_int(int32_t x) { return _mm256_set1_epi32(x); }
inline I load_ints(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline I add(I a, I b) { return _mm256_add_epi32(a, b); }
inline I times_256(I x) { return _mm256_slli_epi32(x, 8); }
inline int32_t hsum(I x) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  half = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 1)));
}
inline I nearest(V x) { return _mm256_cvtps_epi32(x); }
inline V to_floats(I x) { return _mm256_cvtepi32_ps(x); }
/// The lower or upper four bits of every byte.
inline I low_nibbles(I x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline I high_nibbles(I x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
/// The first and third byte of every lane, or the second and fourth, as numbers of 16 bits.
inline I even_bytes(I x) { return _mm256_and_si256(x, _mm256_set1_epi32(0x00ff00ff)); }
inline I odd_bytes(I x) { return _mm256_srli_epi16(x, 8); }
/// acc[i] + the sum over the lane's two numbers of 16 bits of a * b.
inline I dot_shorts(I acc, I a, I b) { return add(acc, _mm256_madd_epi16(a, b)); }
inline void store_shorts(int16_t* p, I x) {
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

/// Transposes a W x W matrix of 32-bit elements.
inline void transpose(V (&x)[W]) {
  V t[W];
  for (int i = 0; i < W; i += 2) {
    t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < W; i += 4) {
    x[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    x[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    x[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    x[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
  }
  for (int i = 0; i < W; ++i) x[i] = t[i];
}

inline I no_ints() { return _mm256_setzero_si256(); }
inline void store_ints(int32_t* p, I x) { _mm256_storeu_si256((__m256i*)p, x); }
/// first, first + 1, ...
inline I count_from(int32_t first) {
  return _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/// Bit i of the result: x[i] < y[i].
inline uint32_t less_mask(V x, V y) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_LT_OQ))); }

/// Moves the lanes of x and n whose bit in `kept` is set to the front of out and ids, which W elements are written to.
inline void compress(V x, I n, uint32_t kept, float* out, int32_t* ids) {
  alignas(32) int32_t order[W] = {};
  for (int i = 0; kept; kept &= kept - 1) order[i++] = __builtin_ctz(kept);
  const __m256i from = _mm256_load_si256((const __m256i*)order);
  store(out, _mm256_permutevar8x32_ps(x, from));
  store_ints(ids, _mm256_permutevar8x32_epi32(n, from));
}

/// 2 W 16-bit integers, from bytes; of the half, the last W are zeros.
inline I load_words(const i8* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline I load_words_half(const i8* p) { return _mm256_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)); }
inline I load_words(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
/// Two of them, over and over.
inline I broadcast_words(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return _mm256_set1_epi32(pair);
}
/// Rounds to the nearest integers, which must fit.
inline void store_words(int16_t* p, V x) {
  const __m256i whole = _mm256_cvtps_epi32(x);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
}
/// acc[i] += a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1]
inline I dot_words(I acc, I a, I b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
/// Pairs (a[i], b[i]), in an order that `ordered` undoes.
struct TwoInts {
  I a, b;
};
inline TwoInts interleave_words(I a, I b) { return {_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)}; }
inline Two ordered(TwoInts x) {
  return {_mm256_cvtepi32_ps(_mm256_permute2x128_si256(x.a, x.b, 0x20)),
          _mm256_cvtepi32_ps(_mm256_permute2x128_si256(x.a, x.b, 0x31))};
}

/// x times a number, in 64-bit lanes, modulo 2^64.
inline __m256i mul64(__m256i x, int64_t number) {
  const __m256i y = _mm256_set1_epi64x(number);
  const __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), y),
                                         _mm256_mul_epu32(x, _mm256_set1_epi64x(int64_t(uint64_t(number) >> 32))));
  return _mm256_add_epi64(_mm256_mul_epu32(x, y), _mm256_slli_epi64(cross, 32));
}

/// splitmix64 (Steele, Lea and Flood, OOPSLA 2014) of each 64-bit lane.
inline __m256i mix(__m256i x) {
  x = _mm256_add_epi64(x, _mm256_set1_epi64x(kGolden));
  x = mul64(_mm256_xor_si256(x, _mm256_srli_epi64(x, 30)), kMix1);
  x = mul64(_mm256_xor_si256(x, _mm256_srli_epi64(x, 27)), kMix2);
  return _mm256_xor_si256(x, _mm256_srli_epi64(x, 31));
}

/// Lane i of the result: the upper half of mix(key + kGolden n[i]), as a float. n is not negative.
inline V hashed(int64_t key, I n) {
  const auto half = [&](__m128i part) {
    return mix(_mm256_add_epi64(_mm256_set1_epi64x(key), mul64(_mm256_cvtepi32_epi64(part), kGolden)));
  };
  const __m256 low = _mm256_castsi256_ps(half(_mm256_castsi256_si128(n)));
  const __m256 high = _mm256_castsi256_ps(half(_mm256_extracti128_si256(n, 1)));
  const __m256i bits =
      _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd)), 0xd8);
  // There are conversions of signed integers only; each half is exact, and their sum is rounded once.
  const V upper = _mm256_cvtepi32_ps(_mm256_srli_epi32(bits, 16));
  const V lower = _mm256_cvtepi32_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0xffff)));
  return fma(upper, set1(65536.f), lower);
}

}  // namespace quire
