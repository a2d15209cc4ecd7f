// Linear layers over packed weights: out = x weight^T + bias.
//
// Weights are packed once into the panels of product.h, so that a step's work streams through them in order. bf16
// weights meet bf16 inputs as pairs where the processor multiplies those; elsewhere they are widened as they are read
// (half the bytes of float weights, which is what bounds small batches), and so is fp16.
//
// Quantised weights are multiplied by quantized.h.
#pragma once
#include "kernels.h"
#include "product.h"
#include "quantized.h"
#include "team.h"

namespace quire {

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

/// One layer. Work is cut by panels of columns and blocks of rows; no cut changes an output's bits.
template <class T>
class Linear {
  using R = typename Packed<T>::type;
  using L = typename Left<R>::type;

 public:
  explicit Linear(const QuireLinear& layer)
      : packed_(static_cast<const R*>(layer.packed)),
        bias_(static_cast<const T*>(layer.bias)),
        quantized_(layer),
        is_quantized_(layer.quantization.bits > 0),
        outputs_(layer.outputs),
        inputs_(layer.inputs),
        steps_(int(layer.inputs / Packed<T>::kElements)),
        panel_(int64_t(steps_) * kPanel) {}

  /// Floats of memory that `run` needs for its copy of x (often none).
  int64_t wide(int64_t rows) const {
    if (is_quantized_) return quantized_.memory(rows);
    return kWidens ? rows * inputs_ : 0;
  }

  /// out [rows, outputs] of x [rows, inputs]. wide: memory that all threads share. Ends with a barrier.
  void run(Team& team, const T* x, int64_t x_stride, int rows, T* out, int64_t out_stride, float* wide) const;

  /// The same for a layer whose outputs are gates and as many values: out [rows, outputs / 2] = silu(gate) * value.
  /// gate_up [rows, outputs] is memory for what cannot stay in caches.
  void run_gated(Team& team, const T* x, int64_t x_stride, int rows, T* gate_up, T* out, float* wide) const;

 private:
  static constexpr int kPanel = kTileVectors * W;
  static constexpr int kHalf = kPanel / 2;
  static constexpr bool kWidens = sizeof(L) != sizeof(T) && Packed<T>::kElements == 1;

  static_assert(QuantizedWeight::kColumns == kHalf);

  struct Input {
    const L* rows;
    int64_t stride;
    RoundedRows rounded = {};  // instead, of a quantised weight
  };

  Input from(Input input, int row) const {
    if (is_quantized_) return {nullptr, 0, quantized_.from(input.rounded, row)};
    return {input.rows + row * input.stride, input.stride};
  }

  Input prepare(Team& team, const T* x, int64_t x_stride, int rows, float* wide) const;
  void columns(Input input, int half, int halves, int rows, T* out, int64_t out_stride) const;
  template <int VECTORS>
  void tile(Input input, int half, int rows, T* out, int64_t out_stride) const;
  void quantized_tile(Input input, int half, int rows, T* out, int64_t out_stride) const;
  void put(V sum, int64_t column, T* to) const;

  const R* packed_;
  const T* bias_;
  const QuantizedWeight quantized_;
  const bool is_quantized_;
  const int64_t outputs_, inputs_;
  const int steps_;
  const int64_t panel_;
};

}  // namespace quire
