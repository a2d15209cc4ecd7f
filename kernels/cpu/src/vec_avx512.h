// V on AVX-512 (F, BW, DQ, VL); with AVX512-BF16 also products of bf16 pairs.
#pragma once

namespace quire {

using V = __m512;
constexpr int W = 16;

inline V zero() { return _mm512_setzero_ps(); }
inline V set1(float x) { return _mm512_set1_ps(x); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V abs(V x) { return _mm512_abs_ps(x); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline float hmax(V x) { return _mm512_reduce_max_ps(x); }
inline float hsum(V x) { return _mm512_reduce_add_ps(x); }

inline V select_less(V x, V y, V yes, V no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), no, yes);
}

/// Lanes begin .. end - 1 of x, `fill` in the others.
inline V keep(V x, int begin, int end, float fill) {
  const auto below = [](int n) { return n >= W ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1; };
  return _mm512_mask_blend_ps(__mmask16(below(end) & ~below(begin)), set1(fill), x);
}

inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline V load(const bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline V load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline V load(const i8* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}

/// Each lane's bits rounded to the nearest bf16, ties to even, in the upper half; the lower half is rubbish.
inline __m512i bf16_bits(V x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), up, _mm512_set1_epi32(0x7fc00000));
}

inline void store(float* p, V x) { _mm512_storeu_ps(p, x); }
inline void store(bf16* p, V x) {
#ifdef __AVX512BF16__
  const __m256i half = (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_bits(x), 16));
#endif
  _mm256_storeu_si256((__m256i*)p, half);
}
inline void store(f16* p, V x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/// Rounds to the nearest integer, ties to even, and to what fits.
inline void store(i8* p, V x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x))); }

struct Two {
  V a, b;
};

template <class T>
inline Two load2(const T* p) {
  return {load(p), load(p + W)};
}
inline Two load2(const bf16* p) {
  const __m512i both = _mm512_loadu_si512(p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))))};
}

template <class T>
inline void store2(T* p, Two x) {
  store(p, x.a);
  store(p + W, x.b);
}
inline void store2(bf16* p, Two x) {
  const __m512i odd = _mm512_and_si512(bf16_bits(x.b), _mm512_set1_epi32(int(0xffff0000)));
  _mm512_storeu_si512(p, _mm512_or_si512(_mm512_srli_epi32(bf16_bits(x.a), 16), odd));
}

/// Lane i of the result is the sum over the lanes of x[i]: pairs of vectors are folded into one, four times.
inline V hsums(const V (&x)[W]) {
  V pairs[8], fours[4];
  for (int i = 0; i < 8; ++i)
    pairs[i] = add(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto fold = [](V a, V b) { return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); };
  return fold(fold(fours[0], fours[1]), fold(fours[2], fours[3]));
}

/// 2^x: the power of the nearest integer times a polynomial of the rest (Cephes' exp2f). 0 far below 0, so for -inf.
inline V exp2(V x) {
  x = max(x, set1(-160.f));
  const V n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const V r = sub(x, n);
  V p = set1(1.535336188319500e-4f);
  p = fma(p, r, set1(1.339887440266574e-3f));
  p = fma(p, r, set1(9.618437357674640e-3f));
  p = fma(p, r, set1(5.550332471162809e-2f));
  p = fma(p, r, set1(2.402264791363012e-1f));
  p = fma(p, r, set1(6.931472028550421e-1f));
  p = fma(p, r, set1(1.f));
  return _mm512_scalef_ps(p, n);
}

/// W numbers of 32 bits, and what products of small integers need of them.
using I = __m512i;

inline I set1_int(int32_t x) { return _mm512_set1_epi32(x); }
inline I load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline I add(I a, I b) { return _mm512_add_epi32(a, b); }
inline I times_256(I x) { return _mm512_slli_epi32(x, 8); }
inline int32_t hsum(I x) { return _mm512_reduce_add_epi32(x); }
inline I nearest(V x) { return _mm512_cvtps_epi32(x); }
inline V to_floats(I x) { return _mm512_cvtepi32_ps(x); }
/// The lower or upper four bits of every byte.
inline I low_nibbles(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline I high_nibbles(I x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
#ifdef __AVX512VNNI__
/// acc[i] + the sum over the lane's four bytes of codes (unsigned) * x (signed).
inline I dot_bytes(I acc, I codes, I x) { return _mm512_dpbusd_epi32(acc, codes, x); }
inline I over_256(I x) { return _mm512_srai_epi32(x, 8); }
inline void store_low_bytes(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }
#else
/// The first and third byte of every lane, or the second and fourth, as numbers of 16 bits.
inline I even_bytes(I x) { return _mm512_and_si512(x, _mm512_set1_epi32(0x00ff00ff)); }
inline I odd_bytes(I x) { return _mm512_srli_epi16(x, 8); }
/// acc[i] + the sum over the lane's two numbers of 16 bits of a * b.
inline I dot_shorts(I acc, I a, I b) { return add(acc, _mm512_madd_epi16(a, b)); }
inline void store_shorts(int16_t* p, I x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(x)); }
#endif

/// Transposes a W x W matrix of 32-bit elements.
inline void transpose(V (&x)[W]) {
  V t[W];
  for (int i = 0; i < W; i += 2) {
    t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  const auto lo = [](V a, V b) { return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
  const auto hi = [](V a, V b) { return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
  for (int i = 0; i < W; i += 4) {
    x[i] = lo(t[i], t[i + 2]);
    x[i + 1] = hi(t[i], t[i + 2]);
    x[i + 2] = lo(t[i + 1], t[i + 3]);
    x[i + 3] = hi(t[i + 1], t[i + 3]);
  }
  // Now x[4 i + j] holds, in quarter q, column 4 q + j of rows 4 i .. 4 i + 3.
  for (int j = 0; j < 4; ++j) {
    const V a = _mm512_shuffle_f32x4(x[j], x[4 + j], 0x88), b = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x88);
    const V c = _mm512_shuffle_f32x4(x[j], x[4 + j], 0xdd), d = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xdd);
    t[j] = _mm512_shuffle_f32x4(a, b, 0x88);
    t[8 + j] = _mm512_shuffle_f32x4(a, b, 0xdd);
    t[4 + j] = _mm512_shuffle_f32x4(c, d, 0x88);
    t[12 + j] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
  for (int i = 0; i < W; ++i) x[i] = t[i];
}

inline I no_ints() { return _mm512_setzero_si512(); }
inline void store_ints(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
/// first, first + 1, ...
inline I count_from(int32_t first) {
  return _mm512_add_epi32(_mm512_set1_epi32(first),
                          _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

/// Bit i of the result: x[i] < y[i].
inline uint32_t less_mask(V x, V y) { return _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ); }

/// Moves the lanes of x and n whose bit in `kept` is set to the front of out and ids, which W elements are written to.
inline void compress(V x, I n, uint32_t kept, float* out, int32_t* ids) {
  store(out, _mm512_maskz_compress_ps(__mmask16(kept), x));
  store_ints(ids, _mm512_maskz_compress_epi32(__mmask16(kept), n));
}

/// 2 W 16-bit integers, from bytes; of the half, the last W are zeros.
inline I load_words(const i8* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline I load_words_half(const i8* p) {
  return _mm512_cvtepi8_epi16(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)p)));
}
inline I load_words(const int16_t* p) { return _mm512_loadu_si512(p); }
/// Two of them, over and over.
inline I broadcast_words(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return _mm512_set1_epi32(pair);
}
/// Rounds to the nearest integers, which must fit.
inline void store_words(int16_t* p, V x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
/// acc[i] += a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1]
inline I dot_words(I acc, I a, I b) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(acc, a, b);
#else
  return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b));
#endif
}
/// Pairs (a[i], b[i]), in an order that `ordered` undoes.
struct TwoInts {
  I a, b;
};
inline TwoInts interleave_words(I a, I b) { return {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)}; }
inline Two ordered(TwoInts x) {
  const I low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  return {_mm512_cvtepi32_ps(_mm512_permutex2var_epi64(x.a, low, x.b)),
          _mm512_cvtepi32_ps(_mm512_permutex2var_epi64(x.a, high, x.b))};
}

/// splitmix64 (Steele, Lea and Flood, OOPSLA 2014) of each 64-bit lane.
inline __m512i mix(__m512i x) {
  x = _mm512_add_epi64(x, _mm512_set1_epi64(kGolden));
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), _mm512_set1_epi64(kMix1));
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), _mm512_set1_epi64(kMix2));
  return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

/// Lane i of the result: the upper half of mix(key + kGolden n[i]), as a float. n is not negative.
inline V hashed(int64_t key, I n) {
  const auto half = [&](__m256i part) {
    return mix(_mm512_add_epi64(_mm512_set1_epi64(key),
                                _mm512_mullo_epi64(_mm512_cvtepi32_epi64(part), _mm512_set1_epi64(kGolden))));
  };
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return _mm512_cvtepu32_ps(
      _mm512_permutex2var_epi32(half(_mm512_castsi512_si256(n)), odd, half(_mm512_extracti64x4_epi64(n, 1))));
}

#ifdef __AVX512BF16__
/// acc[i] += a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1]
inline V dot_pairs(V acc, __m512i a, __m512i b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
inline __m512i load_pairs(const void* p) { return _mm512_loadu_si512(p); }
inline __m512i load_pairs(const void* p, int pairs) {
  return _mm512_maskz_loadu_epi32(__mmask16((1u << pairs) - 1), p);
}
/// out[i] = (a[i], b[i]) for 32 elements each.
inline void interleave(const bf16* a, const bf16* b, bf16x2* out) {
  alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  _mm512_storeu_si512(out, _mm512_permutex2var_epi16(x, low, y));
  _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi16(x, high, y));
}
#endif

}  // namespace quire
