// The plainest fast product over a packed bf16 weight, as a mark for ours: a parallel loop over panels of 64 columns, and
// tiles of up to six rows that stay in registers. Needs AVX512-BF16, and outputs that are a multiple of 64.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kColumns = 64, kRows = 6;

template <int ROWS>
void tile(const uint16_t* x, int64_t inputs, const uint16_t* panel, uint16_t* out, int64_t outputs) {
  __m512 sums[ROWS][4] = {};
  for (int64_t k = 0; k < inputs; k += 2, panel += 2 * kColumns) {
    __m512bh columns[4];
    for (int j = 0; j < 4; ++j) columns[j] = (__m512bh)_mm512_loadu_si512(panel + 32 * j);
    for (int i = 0; i < ROWS; ++i) {
      int32_t pair;
      std::memcpy(&pair, x + i * inputs + k, sizeof pair);
      const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
      for (int j = 0; j < 4; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], row, columns[j]);
    }
  }
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < 4; ++j)
      _mm256_storeu_si256((__m256i*)(out + i * outputs + 16 * j), (__m256i)_mm512_cvtneps_pbh(sums[i][j]));
}

template <int ROWS>
void rows_of(int rows, const uint16_t* x, int64_t inputs, const uint16_t* panel, uint16_t* out, int64_t outputs) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return tile<ROWS>(x, inputs, panel, out, outputs);
    rows_of<ROWS - 1>(rows, x, inputs, panel, out, outputs);
  }
}

}  // namespace

extern "C" {

/// packed: for each panel and each pair of inputs, that pair of every column.
void plain_pack(const uint16_t* weight, uint16_t* packed, int64_t outputs, int64_t inputs) {
  for (int64_t n = 0; n < outputs; ++n)
    for (int64_t k = 0; k < inputs; ++k)
      packed[n / kColumns * kColumns * inputs + k / 2 * 2 * kColumns + n % kColumns * 2 + k % 2] = weight[n * inputs + k];
}

/// out [rows, outputs] of x [rows, inputs].
void plain_gemm(const uint16_t* x, const uint16_t* packed, uint16_t* out, int64_t rows, int64_t outputs, int64_t inputs) {
#pragma omp parallel for
  for (int64_t n = 0; n < outputs; n += kColumns)
    for (int64_t row = 0; row < rows; row += kRows)
      rows_of<kRows>(int(std::min<int64_t>(kRows, rows - row)), x + row * inputs, inputs, packed + n * inputs,
                     out + row * outputs + n, outputs);
}
}
