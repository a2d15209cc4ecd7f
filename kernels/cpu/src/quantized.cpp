#include "quantized.h"

#include "product.h"

namespace quire {
namespace {

#ifdef __AVX512VNNI__
constexpr int kOrder[4] = {0, 1, 2, 3};
#else
constexpr int kOrder[4] = {0, 2, 1, 3};  // even bytes are then two neighbours, and so are odd ones
#endif

template <int BITS>
void pack(const QuireQuantization& how, const uint8_t* codes, const f16* scales, const f16* minimums, uint8_t* packed,
          int64_t outputs, int64_t inputs) {
  constexpr int kColumns = QuantizedWeight::kColumns;
  const int64_t groups = inputs / how.group, panels = (outputs + kColumns - 1) / kColumns;
#pragma omp parallel for
  for (int64_t panel = 0; panel < panels; ++panel) {
    uint8_t* to = packed + panel * QuantizedWeight::panel_bytes(how, inputs);
    const auto row = [&](int column) { return std::min(panel * kColumns + column, outputs - 1); };  // padding: any
    for (int64_t group = 0; group < groups; ++group) {
      for (int k = 0; k < how.group; k += 32 / BITS)
        for (int column = 0; column < kColumns; ++column)
          for (int e : kOrder) {
            const uint8_t* code = codes + row(column) * inputs + group * how.group + k + e;
            *to++ = BITS == 8 ? *code : uint8_t(code[0] | code[4] << 4);
          }
      for (const f16* values : {scales, minimums})
        for (int column = 0; values && column < kColumns; ++column, to += sizeof(f16))
          std::memcpy(to, values + row(column) * groups + group, sizeof(f16));
    }
  }
}

/// sums[i][j] += the products of four inputs of each row (x apart by `stride`) with columns[j].
template <int ROWS, int VECTORS>
inline void multiply_four(I (&sums)[ROWS][VECTORS], const I (&columns)[VECTORS], const RoundedRows::Digit* x,
                          int64_t stride) {
  const auto broadcast = [](const RoundedRows::Digit* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return set1_int(bits);
  };
#ifdef __AVX512VNNI__
  for (int i = 0; i < ROWS; ++i) {
    const I row = broadcast(x + i * stride);
    for (int j = 0; j < VECTORS; ++j) sums[i][j] = dot_bytes(sums[i][j], columns[j], row);
  }
#else
  I even[VECTORS], odd[VECTORS];
  for (int j = 0; j < VECTORS; ++j) even[j] = even_bytes(columns[j]), odd[j] = odd_bytes(columns[j]);
  for (int i = 0; i < ROWS; ++i) {
    const I first = broadcast(x + i * stride), last = broadcast(x + i * stride + 2);
    for (int j = 0; j < VECTORS; ++j) sums[i][j] = dot_shorts(dot_shorts(sums[i][j], even[j], first), odd[j], last);
  }
#endif
}

}  // namespace

template <int BITS, bool MINIMUMS, int ROWS>
void QuantizedWeight::multiply_rows(RoundedRows x, const uint8_t* panel, float* out) const {
  const int planes = this->planes();
  const int64_t groups = this->groups(), stride = planes * inputs_;
  V c[ROWS][kVectors];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < kVectors; ++j) c[i][j] = zero();
  for (int64_t group = 0; group < groups; ++group) {
    I sums[ROWS][kVectors];
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < kVectors; ++j) sums[i][j] = set1_int(0);
    const RoundedRows::Digit* digits = x.digits + group * how_.group;
    const uint8_t* codes = nullptr;
    for (int plane = 0; plane < planes; ++plane, digits += inputs_) {
      codes = panel;
      if (plane > 0)
        for (int i = 0; i < ROWS; ++i)
          for (int j = 0; j < kVectors; ++j) sums[i][j] = times_256(sums[i][j]);
      for (int k = 0; k < how_.group; k += 32 / BITS, codes += 4 * kColumns) {
        I columns[kVectors];
        for (int j = 0; j < kVectors; ++j) columns[j] = load_ints(codes + j * 4 * W);
        if constexpr (BITS == 8) {
          multiply_four(sums, columns, digits + k, stride);
        } else {
          I nibbles[kVectors];
          for (int j = 0; j < kVectors; ++j) nibbles[j] = low_nibbles(columns[j]);
          multiply_four(sums, nibbles, digits + k, stride);
          for (int j = 0; j < kVectors; ++j) nibbles[j] = high_nibbles(columns[j]);
          multiply_four(sums, nibbles, digits + k + 4, stride);
        }
      }
    }
    const f16* scales = reinterpret_cast<const f16*>(codes);
    for (int j = 0; j < kVectors; ++j) {
      const V scale = load(scales + j * W);
      for (int i = 0; i < ROWS; ++i) {
        I sum = sums[i][j];
        if constexpr (!MINIMUMS) sum = add(sum, set1_int(x.zeros[i * groups + group]));
        c[i][j] = fma(to_floats(sum), mul(scale, set1(x.scales[i * groups + group])), c[i][j]);
      }
      if constexpr (MINIMUMS) {
        const V minimum = load(scales + kColumns + j * W);
        for (int i = 0; i < ROWS; ++i) c[i][j] = fma(minimum, set1(x.sums[i * groups + group]), c[i][j]);
      }
    }
    panel = codes + kColumns * (MINIMUMS ? 4 : 2);
  }
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < kVectors; ++j) store(out + i * kColumns + j * W, c[i][j]);
}

void QuantizedWeight::multiply(RoundedRows x, int rows, int64_t panel, float* out) const {
  const uint8_t* from = panels_ + panel * panel_bytes(how_, inputs_);
  by_rows(rows, [&]<int ROWS>() {
    if constexpr (ROWS <= kRows) {
      if (how_.bits == 4)
        multiply_rows<4, true, ROWS>(x, from, out);
      else if (how_.minimums)
        multiply_rows<8, true, ROWS>(x, from, out);
      else
        multiply_rows<8, false, ROWS>(x, from, out);
    }
  });
}

}  // namespace quire

using namespace quire;

int64_t quire_quantized_bytes(const QuireQuantization* how, int64_t outputs, int64_t inputs) {
  constexpr int kColumns = QuantizedWeight::kColumns;
  return (outputs + kColumns - 1) / kColumns * QuantizedWeight::panel_bytes(*how, inputs);
}

void quire_quantized_pack(const QuireQuantization* how, const uint8_t* codes, const void* scales,
                          const void* minimums, void* packed, int64_t outputs, int64_t inputs) {
  const auto run = how->bits == 4 ? pack<4> : pack<8>;
  run(*how, codes, static_cast<const f16*>(scales), static_cast<const f16*>(minimums), static_cast<uint8_t*>(packed),
      outputs, inputs);
}
