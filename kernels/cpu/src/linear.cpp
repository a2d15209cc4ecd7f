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
  if (is_quantized_) return {nullptr, 0, quantized_.round(team, x, x_stride, rows, wide)};
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
  if (is_quantized_) {
    for (int i = 0; i < halves; ++i) quantized_tile(input, half + i, rows, out + i * kHalf, out_stride);
    return;
  }
  if (halves == 2 && half % 2 == 0) return tile<kTileVectors>(input, half, rows, out, out_stride);
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
      multiply<kTileVectors>(c, input.rows + first * input.stride, input.stride, right, panel_, steps_);
      for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECTORS; ++j)
          put(c[i][j], int64_t(half) * kHalf + j * W, out + (first + i) * out_stride + j * W);
    });
  });
}

template <class T>
void Linear<T>::quantized_tile(Input input, int half, int rows, T* out, int64_t out_stride) const {
  in_tiles(
      rows,
      [&](int first, int size) {
        alignas(64) float sums[QuantizedWeight::kRows * kHalf];
        quantized_.multiply(quantized_.from(input.rounded, first), size, half, sums);
        for (int i = 0; i < size; ++i)
          for (int j = 0; j < kHalf; j += W)
            put(load(sums + i * kHalf + j), int64_t(half) * kHalf + j, out + (first + i) * out_stride + j);
      },
      QuantizedWeight::kRows);
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
