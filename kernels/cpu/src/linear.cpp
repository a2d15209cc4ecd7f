// Linear layers over packed weights: out = x weight^T + bias.
//
// Weights are packed once into the panels of product.h, so that a step's work streams through them in order. bf16
// weights meet bf16 inputs as pairs where the processor multiplies those; elsewhere they are widened as they are read
// (half the bytes of float weights, which is what bounds small batches), and so is fp16.
#include <omp.h>

#include <algorithm>

#include "dispatch.h"
#include "memory.h"
#include "product.h"

namespace quire {
namespace {

constexpr int kPanel = kTileVectors * W;
constexpr int kHalf = kPanel / 2;

template <class T>
struct Packed {
  using type = T;  // an entry of the packed weight
  static constexpr int kElements = 1;
};
#ifdef __AVX512BF16__
template <>
struct Packed<bf16> {
  using type = bf16x2;
  static constexpr int kElements = 2;
};
#endif

template <class T>
void pack(const T* weight, T* packed, int64_t outputs, int64_t inputs) {
  constexpr int kElements = Packed<T>::kElements;
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
#pragma omp parallel for
  for (int64_t panel = 0; panel < panels; ++panel) {
    T* to = packed + panel * inputs * kPanel;
    for (int64_t k = 0; k < inputs; k += kElements)
      for (int64_t n = panel * kPanel; n < (panel + 1) * kPanel; ++n)
        for (int e = 0; e < kElements; ++e) *to++ = n < outputs ? weight[n * inputs + k + e] : T{};
  }
}

template <class T>
class Linear {
  using R = typename Packed<T>::type;
  using L = typename Left<R>::type;

 public:
  Linear(const T* x, int64_t x_stride, const void* packed, const T* bias, T* out, int64_t out_stride, int64_t rows,
         int64_t outputs, int64_t inputs)
      : x_(x),
        x_stride_(x_stride),
        packed_(static_cast<const R*>(packed)),
        bias_(bias),
        out_(out),
        out_stride_(out_stride),
        rows_(int(rows)),
        outputs_(outputs),
        inputs_(inputs),
        steps_(int(inputs / Packed<T>::kElements)),
        panel_(int64_t(steps_) * kPanel) {}

  void run(int threads) {
    if (rows_ == 0) return;
    // Columns first: every thread then reads its part of the weight once. Rows as well where columns are too few.
    const int halves = int((outputs_ + kHalf - 1) / kHalf);
    const int across = std::min(threads, halves);
    const int down = std::min(threads / across, (rows_ + kTileRows - 1) / kTileRows);
    const L* left = nullptr;
    int64_t stride = 0;
    float* wide = nullptr;
    if constexpr (sizeof(L) == sizeof(T) || Packed<T>::kElements == 2) {
      left = reinterpret_cast<const L*>(x_);
      stride = x_stride_ * int64_t(sizeof(T)) / int64_t(sizeof(L));
    } else {
      wide = static_cast<float*>(scratch<kShared>(size_t(rows_) * inputs_ * sizeof(float)));
      stride = inputs_;
    }
#pragma omp parallel num_threads(across * down)
    {
      if constexpr (sizeof(L) != sizeof(T) && Packed<T>::kElements == 1) {
#pragma omp for
        for (int row = 0; row < rows_; ++row) widen(x_ + row * x_stride_, wide + row * inputs_);
      }
      const L* const from = wide ? reinterpret_cast<const L*>(wide) : left;
      const int thread = omp_get_thread_num(), i = thread % across, j = thread / across;
      const int row = int(int64_t(rows_) * j / down), row_end = int(int64_t(rows_) * (j + 1) / down);
      int half = int(int64_t(halves) * i / across);
      const int end = int(int64_t(halves) * (i + 1) / across);
      if (half % 2 && half < end) columns<kTileVectors / 2>(from, stride, half++, row, row_end);
      for (; half + 2 <= end; half += 2) columns<kTileVectors>(from, stride, half, row, row_end);
      if (half < end) columns<kTileVectors / 2>(from, stride, half, row, row_end);
    }
  }

 private:
  void widen(const T* from, float* to) const {
    int64_t k = 0;
    for (; k + W <= inputs_; k += W) store(to + k, load(from + k));
    for (; k < inputs_; ++k) to[k] = to_float(from[k]);
  }

  /// The columns of one panel, or of half of one, for rows row .. row_end - 1.
  template <int VECTORS>
  void columns(const L* left, int64_t stride, int half, int row, int row_end) const {
    const R* right = packed_ + half / 2 * panel_ + half % 2 * kHalf;
    in_tiles(row_end - row, [&](int first, int size) {
      by_rows(size, [&]<int ROWS>() {
        V c[ROWS][VECTORS];
        for (int i = 0; i < ROWS; ++i)
          for (int j = 0; j < VECTORS; ++j) c[i][j] = zero();
        multiply<kTileVectors>(c, left + (row + first) * stride, stride, right, panel_, steps_);
        for (int i = 0; i < ROWS; ++i)
          for (int j = 0; j < VECTORS; ++j) put(c[i][j], row + first + i, int64_t(half) * kHalf + j * W);
      });
    });
  }

  void put(V sum, int64_t row, int64_t column) const {
    T* to = out_ + row * out_stride_ + column;
    if (column + W <= outputs_) {
      store(to, bias_ ? add(sum, load(bias_ + column)) : sum);
      return;
    }
    alignas(64) float sums[W];
    store(sums, sum);
    for (int64_t n = column; n < outputs_; ++n)
      to[n - column] = from_float<T>(sums[n - column] + (bias_ ? to_float(bias_[n]) : 0.f));
  }

  const T* x_;
  const int64_t x_stride_;
  const R* packed_;
  const T* bias_;
  T* out_;
  const int64_t out_stride_;
  const int rows_;
  const int64_t outputs_, inputs_;
  const int steps_;
  const int64_t panel_;
};

}  // namespace
}  // namespace quire

using namespace quire;

int64_t quire_linear_bytes(int32_t dtype, int64_t outputs, int64_t inputs) {
  return (outputs + kPanel - 1) / kPanel * kPanel * inputs * (dtype == kFloat32 ? 4 : 2);
}

void quire_linear_pack(int32_t dtype, const void* weight, void* packed, int64_t outputs, int64_t inputs) {
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    pack(static_cast<const T*>(weight), static_cast<T*>(packed), outputs, inputs);
  });
}

void quire_linear(int32_t dtype, const void* x, int64_t x_stride, const void* packed, const void* bias, void* out,
                  int64_t out_stride, int64_t rows, int64_t outputs, int64_t inputs) {
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Linear<T>(static_cast<const T*>(x), x_stride, packed, static_cast<const T*>(bias), static_cast<T*>(out),
              out_stride, rows, outputs, inputs)
        .run(omp_get_max_threads());
  });
}
