// The matrix product under packed linear and prefill attention: a few rows of a row-major left side times a packed
// right side, kept in registers.
//
// The right side [steps, columns] is packed in panels of a few vectors of columns: a panel holds, for each step, the
// entries of its columns. An entry is one element, or a pair of bf16 that are neighbours along the summed dimension (a step
// then covers two elements); the left side has matching entries, as floats or as pairs of its own.
#pragma once
#include "vec.h"

namespace quire {

template <class R>
struct Left {
  using type = float;
};

/// What both sides of a product of two T are packed as.
template <class T>
struct Entry {
  using type = float;
};

inline V broadcast(const float* p) { return set1(*p); }
inline V load_right(const float* p) { return load(p); }
inline V load_right(const bf16* p) { return load(p); }
inline V load_right(const f16* p) { return load(p); }
inline V multiply_add(V left, V right, V acc) { return fma(left, right, acc); }

#ifdef __AVX512BF16__
template <>
struct Left<bf16x2> {
  using type = bf16x2;
};
template <>
struct Entry<bf16> {
  using type = bf16x2;
};
/// The pair type of this processor's products: both factors of a bf16 product are read as pairs where it has them.
inline __m512i broadcast(const bf16x2* p) { return _mm512_set1_epi32(int(p->bits)); }
inline __m512i load_right(const bf16x2* p) { return load_pairs(p); }
inline V multiply_add(__m512i left, __m512i right, V acc) { return dot_pairs(acc, left, right); }
#endif

/// Rows and vectors of columns of a tile that fit the registers.
constexpr int kTileRows = 6;
constexpr int kTileVectors = W == 16 ? 4 : 2;

/// c[i][j] += sum over steps of left[i * stride + step] * right, column vector j. PANEL: vectors of columns in a panel;
/// panel: entries from one to the next.
template <int PANEL, int ROWS, int VECTORS, class R>
inline void multiply(V (&c)[ROWS][VECTORS], const typename Left<R>::type* left, int64_t stride, const R* right,
                     int64_t panel, int steps) {
  for (int k = 0; k < steps; ++k) {
    decltype(load_right(right)) columns[VECTORS];
    for (int j = 0; j < VECTORS; ++j)
      columns[j] = load_right(right + j / PANEL * panel + (k * PANEL + j % PANEL) * W);
    for (int i = 0; i < ROWS; ++i) {
      const auto row = broadcast(left + i * stride + k);
      for (int j = 0; j < VECTORS; ++j) c[i][j] = multiply_add(row, columns[j], c[i][j]);
    }
  }
}

/// Calls f.template operator()<ROWS>() with ROWS = rows of 1 .. kTileRows.
template <class F>
inline void by_rows(int rows, F f) {
  switch (rows) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    case 3:
      return f.template operator()<3>();
    case 4:
      return f.template operator()<4>();
    case 5:
      return f.template operator()<5>();
    default:
      return f.template operator()<6>();
  }
}

/// Cuts `rows` into tiles of at most `most` rows and nearly equal size: calls f(first row, rows) for each.
template <class F>
inline void in_tiles(int rows, F f, int most = kTileRows) {
  const int tiles = (rows + most - 1) / most;
  for (int tile = 0, row = 0; tile < tiles; ++tile) {
    const int size = rows / tiles + (tile < rows % tiles);
    f(row, size);
    row += size;
  }
}

}  // namespace quire
