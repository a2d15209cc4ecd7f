// The likeliest token of a row.
#pragma once
#include <algorithm>

#include "vec.h"

namespace quire {

struct Best {
  float value;
  int64_t index;
};

/// The first largest of row[begin .. end - 1]: maxima of short runs first, then a search in the run that holds it.
template <class T>
inline Best best(const T* row, int64_t begin, int64_t end) {
  constexpr int64_t kRun = 64 * W;
  Best found{-kInf, begin};
  for (int64_t run = begin; run < end; run += kRun) {
    const int64_t stop = std::min(run + kRun, end);
    V highest = set1(-kInf);
    int64_t i = run;
    for (; i + W <= stop; i += W) highest = max(load(row + i), highest);  // in this order a NaN loses
    float value = hmax(highest);
    for (; i < stop; ++i) value = std::max(value, to_float(row[i]));
    if (value <= found.value) continue;
    found.value = value;
    found.index = std::find_if(row + run, row + stop, [&](T x) { return to_float(x) == value; }) - row;
  }
  return found;
}

}  // namespace quire
