#include "linear.h"

#include "dispatch.h"
#include "memory.h"
#include "rows.h"

namespace quire {
namespace {

/// Rows of one item of work: their inputs stay in the second-level cache with a panel of the weight.
constexpr int kRowBlock = 96;

template <class T>
void pack(const T* weight, T* packed, int64_t outputs, int64_t inputs) {
  constexpr int kElements = Packed<T>::kElements, kPanel = kTileVectors * W;
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
#pragma omp parallel for
  for (int64_t panel = 0; panel < panels; ++panel) {
    T* to = packed + panel * inputs * kPanel;
    for (int64_t k = 0; k < inputs; k += kElements)
      for (int64_t n = panel * kPanel; n < (panel + 1) * kPanel; ++n)
        for (int e = 0; e < kElements; ++e) *to++ = n < outputs ? weight[n * inputs + k + e] : T{};
  }
}

/// packed: panels of [inputs / 4][columns][4], each w + 128.
template <class T>
void pack_int8(const T* weight, uint8_t* packed, float* scales, int64_t outputs, int64_t inputs) {
  constexpr int kPanel = kTileVectors * W;
  const int64_t columns = (outputs + kPanel - 1) / kPanel * kPanel;
#pragma omp parallel for
  for (int64_t n = 0; n < columns; ++n) {
    float highest = 0;
    for (int64_t k = 0; n < outputs && k < inputs; ++k)
      highest = std::max(highest, std::fabs(to_float(weight[n * inputs + k])));
    scales[n] = highest / 127;
    const float inverse = highest > 0 ? 127 / highest : 0;
    for (int64_t k = 0; k < inputs; ++k) {
      const float value = n < outputs ? std::nearbyint(to_float(weight[n * inputs + k]) * inverse) : 0;
      packed[n / kPanel * kPanel * inputs + k / 4 * kPanel * 4 + n % kPanel * 4 + k % 4] = uint8_t(int(value) + 128);
    }
  }
}

/// Cuts columns, counted in half panels, into whole panels, the last ones into halves so that threads end together.
struct Columns {
  int wholes, items;

  Columns(int halves, int threads) {
    const int singles = threads == 1 ? halves % 2 : std::min(halves, 2 * threads - 2 + halves % 2);
    wholes = (halves - singles) / 2;
    items = halves - wholes;
  }
  int first(int item) const { return item < wholes ? 2 * item : item + wholes; }
  int halves(int item) const { return item < wholes ? 2 : 1; }
};

}  // namespace

template <class T>
void Linear<T>::run(Team& team, const T* x, int64_t x_stride, int rows, T* out, int64_t out_stride,
                    float* wide) const {
  const Input input = prepare(team, x, x_stride, rows, wide);
  const int blocks = (rows + kRowBlock - 1) / kRowBlock;
  const Columns cut(int((outputs_ + kHalf - 1) / kHalf), blocks > 1 ? 1 : team.size());
  team.for_each(int64_t(cut.items) * blocks, [&](int64_t i) {
    const int item = int(i / blocks), block = int(i % blocks);
    const int row = int(int64_t(rows) * block / blocks), row_end = int(int64_t(rows) * (block + 1) / blocks);
    const int half = cut.first(item);
    columns(from(input, row), half, cut.halves(item), row_end - row,
            out + row * out_stride + int64_t(half) * kHalf, out_stride);
  });
}

template <class T>
void Linear<T>::run_gated(Team& team, const T* x, int64_t x_stride, int rows, T* gate_up, T* out, float* wide) const {
  const int64_t inner = outputs_ / 2;
  if (inner % kHalf) {  // a gate and its value lie differently in their panels
    run(team, x, x_stride, rows, gate_up, outputs_, wide);
    team.for_ranges(rows, [&](int64_t row, int64_t end) {
      for (; row < end; ++row) gate(gate_up + row * outputs_, gate_up + row * outputs_ + inner, out + row * inner, inner);
    });
    return;
  }
  const Input input = prepare(team, x, x_stride, rows, wide);
  const int halves = int(inner / kHalf), blocks = (rows + kRowBlock - 1) / kRowBlock;
  const Columns cut(halves, blocks > 1 ? 1 : team.size());
  team.for_each(int64_t(cut.items) * blocks, [&](int64_t i) {
    const int item = int(i / blocks), block = int(i % blocks);
    const int row = int(int64_t(rows) * block / blocks), row_end = int(int64_t(rows) * (block + 1) / blocks);
    const int half = cut.first(item), width = cut.halves(item);
    const Input part = from(input, row);
    alignas(64) T gates[kRowBlock * kPanel], ups[kRowBlock * kPanel];
    columns(part, half, width, row_end - row, gates, kPanel);
    columns(part, halves + half, width, row_end - row, ups, kPanel);
    for (int r = 0; r < row_end - row; ++r)
      gate(gates + r * kPanel, ups + r * kPanel, out + (row + r) * inner + int64_t(half) * kHalf, width * kHalf);
  });
}

template <class T>
typename Linear<T>::Input Linear<T>::prepare(Team& team, const T* x, int64_t x_stride, int rows, float* wide) const {
  if (scales_) return quantize(team, x, x_stride, rows, wide);
  if constexpr (kWidens) {
    team.for_ranges(rows, [&](int64_t row, int64_t end) {
      for (; row < end; ++row) {
        const T* from = x + row * x_stride;
        float* to = wide + row * inputs_;
        int64_t k = 0;
        for (; k + W <= inputs_; k += W) store(to + k, load(from + k));
        for (; k < inputs_; ++k) to[k] = to_float(from[k]);
      }
    });
    return {wide, inputs_};
  } else {
    return {reinterpret_cast<const L*>(x), x_stride / Packed<T>::kElements};
  }
}

/// `halves` half panels, the first of them numbered `half`; out points at their first column.
template <class T>
void Linear<T>::columns(Input input, int half, int halves, int rows, T* out, int64_t out_stride) const {
  const bool narrow = scales_ && rows > 2;  // int8 sums and their totals both stay in registers
  if (halves == 2 && half % 2 == 0 && !narrow) return tile<kTileVectors>(input, half, rows, out, out_stride);
  for (int i = 0; i < halves; ++i) tile<kTileVectors / 2>(input, half + i, rows, out + i * kHalf, out_stride);
}

template <class T>
template <int VECTORS>
void Linear<T>::tile(Input input, int half, int rows, T* out, int64_t out_stride) const {
  const R* right = packed_ + half / 2 * panel_ + half % 2 * kHalf;
  in_tiles(rows, [&](int first, int size) {
    by_rows(size, [&]<int ROWS>() {
      V c[ROWS][VECTORS];
      for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECTORS; ++j) c[i][j] = zero();
      if (scales_)
        multiply_int8(c, from(input, first), half);
      else
        multiply<kTileVectors>(c, input.rows + first * input.stride, input.stride, right, panel_, steps_);
      for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECTORS; ++j)
          put(c[i][j], int64_t(half) * kHalf + j * W, out + (first + i) * out_stride + j * W);
    });
  });
}

template <class T>
typename Linear<T>::Input Linear<T>::quantize(Team& team, const T* x, int64_t x_stride, int rows, float* wide) const {
#ifdef __AVX512VNNI__
  const int64_t groups = inputs_ / kGroup;
  int8_t* const quantized = reinterpret_cast<int8_t*>(wide);
  float* const scales = wide + rows * inputs_ / 4;
  int32_t* const sums = reinterpret_cast<int32_t*>(scales + rows * groups);
  team.for_ranges(rows * groups, [&](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      const T* from = x + i / groups * x_stride + i % groups * kGroup;
      V extremes = zero();
      for (int k = 0; k < kGroup; k += W) {
        const V v = load(from + k);
        extremes = max(extremes, max(v, sub(zero(), v)));
      }
      const float highest = hmax(extremes);
      const V inverse = set1(highest > 0 ? 127 / highest : 0);
      __m512i sum = _mm512_setzero_si512();
      for (int k = 0; k < kGroup; k += W) {
        const __m512i nearest = _mm512_cvtps_epi32(mul(load(from + k), inverse));
        sum = _mm512_add_epi32(sum, nearest);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(quantized + i * kGroup + k), _mm512_cvtsepi32_epi8(nearest));
      }
      scales[i] = highest / 127;
      sums[i] = -128 * _mm512_reduce_add_epi32(sum);
    }
  });
  return {nullptr, 0, quantized, scales, sums};
#else
  (void)team, (void)x, (void)x_stride, (void)rows, (void)wide;
  __builtin_unreachable();  // quire_int8_bytes has said that there is no such weight
#endif
}

template <class T>
template <int ROWS, int VECTORS>
void Linear<T>::multiply_int8(V (&c)[ROWS][VECTORS], Input input, int half) const {
#ifdef __AVX512VNNI__
  constexpr int kSteps = kGroup / 4;
  const int64_t groups = inputs_ / kGroup;
  const int8_t* right = reinterpret_cast<const int8_t*>(packed_) + half / 2 * inputs_ * kPanel + half % 2 * kHalf * 4;
  for (int64_t group = 0; group < groups; ++group) {
    __m512i sums[ROWS][VECTORS];
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < VECTORS; ++j) sums[i][j] = _mm512_set1_epi32(input.sums[i * groups + group]);
    for (int k = 0; k < kSteps; ++k, right += kPanel * 4) {
      __m512i columns[VECTORS];
      for (int j = 0; j < VECTORS; ++j) columns[j] = _mm512_loadu_si512(right + j * W * 4);
      for (int i = 0; i < ROWS; ++i) {
        int32_t four;
        std::memcpy(&four, input.quantized + i * inputs_ + group * kGroup + k * 4, 4);
        const __m512i row = _mm512_set1_epi32(four);
        for (int j = 0; j < VECTORS; ++j) sums[i][j] = _mm512_dpbusd_epi32(sums[i][j], columns[j], row);
      }
    }
    for (int i = 0; i < ROWS; ++i) {
      const V scale = set1(input.scales[i * groups + group]);
      for (int j = 0; j < VECTORS; ++j) c[i][j] = fma(_mm512_cvtepi32_ps(sums[i][j]), scale, c[i][j]);
    }
  }
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < VECTORS; ++j) c[i][j] = mul(c[i][j], load(scales_ + int64_t(half) * kHalf + j * W));
#else
  (void)c, (void)input, (void)half;
  __builtin_unreachable();  // quire_int8_bytes has said that there is no such weight
#endif
}

template <class T>
void Linear<T>::put(V sum, int64_t column, T* to) const {
  if (column + W <= outputs_) {
    store(to, bias_ ? add(sum, load(bias_ + column)) : sum);
    return;
  }
  alignas(64) float sums[W];
  store(sums, sum);
  for (int64_t n = column; n < outputs_; ++n)
    to[n - column] = from_float<T>(sums[n - column] + (bias_ ? to_float(bias_[n]) : 0.f));
}

template class Linear<float>;
template class Linear<bf16>;
template class Linear<f16>;

}  // namespace quire

using namespace quire;

int64_t quire_linear_bytes(int32_t dtype, int64_t outputs, int64_t inputs) {
  constexpr int64_t kPanel = kTileVectors * W;
  return (outputs + kPanel - 1) / kPanel * kPanel * inputs * (dtype == kFloat32 ? 4 : 2);
}

void quire_linear_pack(int32_t dtype, const void* weight, void* packed, int64_t outputs, int64_t inputs) {
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    pack(static_cast<const T*>(weight), static_cast<T*>(packed), outputs, inputs);
  });
}

int64_t quire_int8_bytes(int64_t outputs, int64_t inputs) {
#ifdef __AVX512VNNI__
  constexpr int64_t kPanel = kTileVectors * W;
  return inputs % kGroup ? 0 : (outputs + kPanel - 1) / kPanel * kPanel * inputs;
#else
  (void)outputs, (void)inputs;
  return 0;
#endif
}

void quire_int8_pack(int32_t dtype, const void* weight, void* packed, float* scales, int64_t outputs, int64_t inputs) {
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    pack_int8(static_cast<const T*>(weight), static_cast<uint8_t*>(packed), scales, outputs, inputs);
  });
}

void quire_linear(int32_t dtype, const QuireLinear* layer, const void* x, int64_t x_stride, void* out,
                  int64_t out_stride, int64_t rows) {
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Linear<T> linear(*layer);
    float* wide = static_cast<float*>(scratch<kShared>(linear.wide(rows) * sizeof(float)));
    Team::run(omp_get_max_threads(), [&](Team& team) {
      linear.run(team, static_cast<const T*>(x), x_stride, int(rows), static_cast<T*>(out), out_stride, wide);
    });
  });
}
