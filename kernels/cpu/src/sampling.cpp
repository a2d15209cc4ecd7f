// Greedy sampling.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "dispatch.h"
#include "vec.h"

namespace quire {
namespace {

struct Best {
  float value;
  int64_t index;
};

/// The first largest of row[begin .. end - 1]: maxima of short runs first, then a search in the run that holds it.
template <class T>
Best best(const T* row, int64_t begin, int64_t end) {
  constexpr int64_t kRun = 64 * W;
  Best found{-kInf, begin};
  for (int64_t run = begin; run < end; run += kRun) {
    const int64_t stop = std::min(run + kRun, end);
    V highest = set1(-kInf);
    int64_t i = run;
    for (; i + W <= stop; i += W) highest = max(highest, load(row + i));
    float value = hmax(highest);
    for (; i < stop; ++i) value = std::max(value, to_float(row[i]));
    if (value <= found.value) continue;
    found.value = value;
    found.index = std::find_if(row + run, row + stop, [&](T x) { return to_float(x) == value; }) - row;
  }
  return found;
}

}  // namespace
}  // namespace quire

void quire_argmax(int32_t dtype, const void* logits, int64_t stride, int64_t* out, int64_t rows, int64_t columns) {
  using namespace quire;
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    // Rows are cut so that one alone also keeps all threads busy.
    const int64_t parts = std::clamp<int64_t>(columns / 8192, 1, omp_get_max_threads());
    std::vector<Best> found(rows * parts);
#pragma omp parallel for
    for (int64_t i = 0; i < rows * parts; ++i) {
      const int64_t part = i % parts;
      found[i] = best(static_cast<const T*>(logits) + i / parts * stride, columns * part / parts,
                      columns * (part + 1) / parts);
    }
    for (int64_t r = 0; r < rows; ++r)
      out[r] = std::max_element(found.begin() + r * parts, found.begin() + (r + 1) * parts,
                                [](const Best& a, const Best& b) { return a.value < b.value; })
                   ->index;
  });
}
