// Products with weights of 4 or 8 bits, in integers.
//
// Along its inputs a weight is cut into groups, and each group of an output has a scale and perhaps a minimum (see
// QuireQuantization). A row of inputs is rounded to integers, with a scale for each of its groups, so that an outlier
// costs precision in its group alone. A group's product is exact; groups are added up as floats.
//
// Integers of one byte are fast and cost some quality. Those of two bytes, 15 bits and a sign, are finer than bf16 has
// them: the products are then as good as those of the weights in floats. Where the processor multiplies bytes (VNNI), a
// number of two bytes is two digits, multiplied one after the other; elsewhere all are multiplied as 16 bits. The
// integers that come out are the same.
//
// Packed are panels of kColumns outputs; a panel holds, for each group, the codes of four (or with 4 bits eight)
// neighbouring inputs of each output, then the group's scales, then its minimums: one stream that is read in order.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "team.h"
#include "vec.h"

namespace quire {

/// Rows of inputs, rounded.
struct RoundedRows {
#ifdef __AVX512VNNI__
  using Digit = int8_t;
#else
  using Digit = int16_t;
#endif
  Digit* digits;   // [rows, planes, inputs]: higher digits, then lower ones, where there are two
  float* scales;   // [rows, groups]
  float* sums;     // [rows, groups]: of the inputs as they were
  int32_t* zeros;  // [rows, groups]: -128 times the sum of the integers
};

class QuantizedWeight {
 public:
  static constexpr int kVectors = W == 16 ? 2 : 1;  // of columns: half a panel of other weights
  static constexpr int kColumns = kVectors * W;
  /// Rows of one product: their sums, those of a group and a few operands stay in registers.
  static constexpr int kRows = W == 16 ? 6 : 4;

  explicit QuantizedWeight(const QuireLinear& layer)
      : panels_(static_cast<const uint8_t*>(layer.packed)), how_(layer.quantization), inputs_(layer.inputs) {}

  static int64_t panel_bytes(const QuireQuantization& how, int64_t inputs) {
    return inputs / how.group * kColumns * (how.group * how.bits / 8 + (how.minimums ? 4 : 2));
  }

  /// Floats of memory for the rounded rows.
  int64_t memory(int64_t rows) const {
    return rows * (inputs_ * planes() * int(sizeof(RoundedRows::Digit)) / 4 + 3 * groups());
  }

  /// Rounds x [rows, inputs]. Ends with a barrier.
  template <class T>
  RoundedRows round(Team& team, const T* x, int64_t x_stride, int rows, float* memory) const {
    RoundedRows to;
    to.scales = memory;
    to.sums = memory + rows * groups();
    to.zeros = reinterpret_cast<int32_t*>(to.sums + rows * groups());
    to.digits = reinterpret_cast<RoundedRows::Digit*>(to.zeros + rows * groups());
    team.for_ranges(rows * groups(), [&](int64_t i, int64_t end) {
      for (; i < end; ++i) round_group(x + i / groups() * x_stride + i % groups() * how_.group, to, i);
    });
    return to;
  }

  RoundedRows from(RoundedRows rows, int row) const {
    return {rows.digits + row * planes() * inputs_, rows.scales + row * groups(), rows.sums + row * groups(),
            rows.zeros + row * groups()};
  }

  /// out [rows, kColumns] of the first `rows` (at most kRows) and panel number `panel`.
  void multiply(RoundedRows x, int rows, int64_t panel, float* out) const;

 private:
  int64_t groups() const { return inputs_ / how_.group; }
  int planes() const { return sizeof(RoundedRows::Digit) == 1 ? how_.digits : 1; }

  template <int BITS, bool MINIMUMS, int ROWS>
  void multiply_rows(RoundedRows x, const uint8_t* panel, float* out) const;

  template <class T>
  void round_group(const T* x, RoundedRows to, int64_t group) const {
    V extremes = zero(), sum = zero();
    for (int k = 0; k < how_.group; k += W) {
      const V v = load(x + k);
      extremes = max(extremes, max(v, sub(zero(), v)));
      sum = add(sum, v);
    }
    const float highest = hmax(extremes), limit = how_.digits == 1 ? 127 : 127 * 256 + 127;
    const V inverse = set1(highest > 0 ? limit / highest : 0);
    I total = set1_int(0);
    RoundedRows::Digit* digits = to.digits + group / groups() * planes() * inputs_ + group % groups() * how_.group;
    for (int k = 0; k < how_.group; k += W, digits += W) {
      const I rounded = nearest(mul(load(x + k), inverse));
      total = add(total, rounded);
#ifdef __AVX512VNNI__
      if (how_.digits == 2) {
        store_low_bytes(digits, over_256(add(rounded, set1_int(128))));  // the lower digit, a signed byte, is the rest
        store_low_bytes(digits + inputs_, rounded);
      } else {
        store_low_bytes(digits, rounded);
      }
#else
      store_shorts(digits, rounded);
#endif
    }
    to.scales[group] = highest / limit;
    to.sums[group] = hsum(sum);
    to.zeros[group] = -128 * hsum(total);
  }

  const uint8_t* panels_;
  const QuireQuantization how_;
  const int64_t inputs_;
};

}  // namespace quire
