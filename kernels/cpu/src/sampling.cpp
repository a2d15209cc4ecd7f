// Choosing one token per row: the likeliest, or a draw.
//
// A draw is argmax(logit / temperature + Gumbel noise) over the tokens that the filters leave; the noise is a hash of
// (seed, position, token), and what is drawn is what kernels/reference/sampling.py draws. Two things make it cheap:
//
// - No sort. top_k and top_p both keep the shortest prefix of the tokens, likeliest first, whose weights (1, or
//   probabilities) reach a sum. Where the prefix ends is looked for among a few levels at a time, in one pass that adds
//   up what lies above each; then what is below is dropped and the next pass looks between two levels, over what is
//   left. Only the last few are put in order.
// - Few logarithms. With noise -log(E), E = -log(1 - u) and u uniform, a token beats the best so far only where
//   E < exp(x - best); as u <= E, those with u >= exp(x - best) need no closer look. Some ten of a row do.
#include <omp.h>

#include <algorithm>
#include <cfloat>
#include <utility>
#include <vector>

#include "argmax.h"
#include "dispatch.h"
#include "memory.h"

namespace quire {
namespace {

constexpr int kLevels = 8;
constexpr float kReach = 16;     // how far below the likeliest token the first levels go
constexpr int64_t kFew = 256;    // tokens that are put in order rather than looked through again
constexpr int kMostPasses = 12;  // levels are then too near each other to tell apart
constexpr uint32_t kLanes = (1u << W) - 1;
constexpr int64_t kRun = 256 * W;  // floats add up that many tokens, doubles the rest

/// The tokens of a row that may be drawn: logits over temperature and ids, and W places after them that may be written.
/// highest and lowest: of the finite x of the whole row.
struct Tokens {
  float* x;
  int32_t* ids;
  int64_t count = 0;
  float highest = -kInf, lowest = kInf;

  /// Lanes i .. i + W - 1 of x, -inf beyond the last.
  V at(int64_t i) const {
    const V lanes = load(x + i);
    return count - i < W ? keep(lanes, 0, int(count - i), -kInf) : lanes;
  }

  /// exp(x - highest)
  V probability(V lanes) const { return exp(sub(lanes, set1(highest))); }

  void drop_below(float limit) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i += W) {
      const uint32_t stay = ~less_mask(at(i), set1(limit)) & kLanes;
      compress(load(x + i), load_ints(ids + i), stay, x + kept, ids + kept);
      kept += __builtin_popcount(stay);
    }
    count = kept;
  }
};

/// Fills `tokens` with logits / temperature. What is not a number becomes -inf.
template <class T>
void scale(const T* logits, int64_t columns, float temperature, Tokens& tokens) {
  V highest = set1(-kInf), lowest = set1(kInf);
  int64_t i = 0;
  for (; i + W <= columns; i += W) {
    const V x = min(max(div(load(logits + i), set1(temperature)), set1(-kInf)), set1(FLT_MAX));
    store(tokens.x + i, x);
    store_ints(tokens.ids + i, count_from(int32_t(i)));
    highest = max(highest, x);
    lowest = min(lowest, select_less(set1(-kInf), x, x, set1(kInf)));
  }
  tokens.highest = hmax(highest), tokens.lowest = -hmax(sub(zero(), lowest));
  for (; i < columns; ++i) {
    const float x = to_float(logits[i]) / temperature;
    tokens.x[i] = std::isnan(x) ? -kInf : std::min(x, FLT_MAX);
    tokens.ids[i] = int32_t(i);
    tokens.highest = std::max(tokens.highest, tokens.x[i]);
    if (tokens.x[i] > -kInf) tokens.lowest = std::min(tokens.lowest, tokens.x[i]);
  }
  tokens.count = columns;
}

/// The sum of weight(lanes), a vector, over all tokens.
template <class Weight>
double total(const Tokens& tokens, Weight weight) {
  double sum = 0;
  for (int64_t run = 0; run < tokens.count; run += kRun) {
    V part = zero();
    for (int64_t i = run; i < std::min(run + kRun, tokens.count); i += W)
      part = add(part, keep(weight(tokens.at(i)), 0, int(std::min<int64_t>(tokens.count - i, W)), 0));
    sum += hsum(part);
  }
  return sum;
}

/// Moves the tokens of x >= high from `tokens` to the end of `above`, and drops those below `low`.
void split(Tokens& tokens, float low, float high, Tokens& above) {
  int64_t kept = 0;
  for (int64_t i = 0; i < tokens.count; i += W) {
    const V x = tokens.at(i);
    const I ids = load_ints(tokens.ids + i);
    const uint32_t up = ~less_mask(x, set1(high)) & kLanes, stay = ~less_mask(x, set1(low)) & ~up & kLanes;
    if (up) {
      compress(x, ids, up, above.x + above.count, above.ids + above.count);
      above.count += __builtin_popcount(up);
    }
    compress(x, ids, stay, tokens.x + kept, tokens.ids + kept);
    kept += __builtin_popcount(stay);
  }
  tokens.count = kept;
}

/// Keeps the tokens that, higher ones and of equals lower ids first, come before the sum of weights reaches `wanted`.
/// spare has room for as many.
template <class Weight>
void keep_prefix(Tokens& tokens, Tokens& spare, double wanted, Weight weight) {
  // spare gets tokens that stay, `above` being the sum of their weights; the prefix ends among those of low <= x < high.
  spare.count = 0;
  double above = 0;
  float high = kInf, low = std::max(tokens.highest - kReach, tokens.lowest);
  for (int pass = 0; pass < kMostPasses && tokens.count > kFew; ++pass) {
    const float top = std::min(high, tokens.highest), step = (top - low) / kLevels;
    float levels[kLevels];
    for (int j = 0; j < kLevels; ++j) levels[j] = j + 1 < kLevels ? top - step * float(j + 1) : low;
    double sums[kLevels] = {};
    for (int64_t run = 0; run < tokens.count; run += kRun) {
      V parts[kLevels];
      for (V& part : parts) part = zero();
      for (int64_t i = run; i < std::min(run + kRun, tokens.count); i += W) {
        const V x = tokens.at(i), w = weight(x);
        for (int j = 0; j < kLevels; ++j) parts[j] = add(parts[j], select_less(x, set1(levels[j]), zero(), w));
      }
      for (int j = 0; j < kLevels; ++j) sums[j] += hsum(parts[j]);
    }
    const auto reaches = [&](double sum) { return above + sum >= wanted; };
    const int found = int(std::find_if(sums, sums + kLevels, reaches) - sums);
    if (found > 0) high = levels[found - 1], above += sums[found - 1];
    low = found < kLevels ? levels[found] : tokens.lowest;
    split(tokens, low, high, spare);
  }

  std::vector<std::pair<float, int32_t>> band(tokens.count);
  for (int64_t i = 0; i < tokens.count; ++i) band[i] = {-tokens.x[i], tokens.ids[i]};
  std::sort(band.begin(), band.end());
  for (const auto& [x, id] : band) {
    if (above >= wanted) break;
    spare.x[spare.count] = -x, spare.ids[spare.count] = id;
    ++spare.count;
    alignas(64) float weights[W];
    store(weights, weight(set1(-x)));
    above += weights[0];
  }
  std::swap(tokens, spare);
}

float gumbel(float uniform) { return -std::log(-std::log1p(-uniform)); }

/// The token whose x with noise added is the highest.
int32_t draw(const Tokens& tokens, int64_t key) {
  constexpr float kLargest = 1 - 0x1p-24f, kMargin = 1.0001f;  // the float below 1; more than exp's error
  int32_t drawn = tokens.ids[0];
  float best = -kInf, reach = kInf;
  for (int64_t i = 0; i < tokens.count; i += W) {
    const V x = tokens.at(i);
    const V hash = hashed(key, load_ints(tokens.ids + i));
    const V uniform = min(mul(add(hash, set1(0.5f)), set1(0x1p-32f)), set1(kLargest));
    uint32_t hopeful = less_mask(uniform, mul(tokens.probability(x), set1(reach)));
    if (!hopeful) continue;
    alignas(64) float noise[W];
    store(noise, uniform);
    for (; hopeful; hopeful &= hopeful - 1) {
      const int lane = __builtin_ctz(hopeful);
      const float value = tokens.x[i + lane] + gumbel(noise[lane]);
      if (value <= best) continue;
      best = value, drawn = tokens.ids[i + lane];
      reach = std::exp(tokens.highest - best) * kMargin;
    }
  }
  return drawn;
}

int64_t mixed(uint64_t x) {
  x += uint64_t(kGolden);
  x = (x ^ (x >> 30)) * uint64_t(kMix1);
  x = (x ^ (x >> 27)) * uint64_t(kMix2);
  return int64_t(x ^ (x >> 31));
}

/// The ids of one row.
struct Ids {
  const int64_t* ids;
  const float* values;
  int64_t count;

  Ids(const QuireIds& all, int64_t row)
      : ids(all.ids + all.bounds[row]),
        values(all.values ? all.values + all.bounds[row] : nullptr),
        count(all.bounds[row + 1] - all.bounds[row]) {}
};

/// Applies a row's edits to x, its logits.
void edit(float* x, int64_t columns, const QuireEdits& edits, int64_t row) {
  if (const Ids allowed(edits.allowed, row); allowed.count) {
    std::vector<float> kept(allowed.count);
    for (int64_t i = 0; i < allowed.count; ++i) kept[i] = x[allowed.ids[i]];
    std::fill_n(x, columns, -kInf);
    for (int64_t i = 0; i < allowed.count; ++i) x[allowed.ids[i]] = kept[i];
  }
  const Ids banned(edits.banned, row), bias(edits.bias, row), seen(edits.seen, row);
  for (int64_t i = 0; i < banned.count; ++i) x[banned.ids[i]] = -kInf;
  for (int64_t i = 0; i < bias.count; ++i) x[bias.ids[i]] += bias.values[i];
  const float *penalties = edits.penalties + 3 * row, repetition = penalties[0];
  for (int64_t i = 0; i < seen.count; ++i) {
    float& logit = x[seen.ids[i]];
    logit = logit > 0 ? logit / repetition : logit * repetition;
    logit -= penalties[1] * seen.values[i];
    if (seen.values[i] > 0) logit -= penalties[2];
  }
}

bool is_edited(const QuireEdits& edits, int64_t row) {
  const auto any = [&](const QuireIds& of) { return of.bounds[row] < of.bounds[row + 1]; };
  return any(edits.allowed) || any(edits.banned) || any(edits.bias) || any(edits.seen);
}

template <class T>
int64_t sample(const T* logits, int64_t columns, const QuireSampling& how, const QuireEdits* edits, int64_t row) {
  if (edits && is_edited(*edits, row)) {
    float* edited = static_cast<float*>(scratch<kEdited>(columns * sizeof(float)));
    std::transform(logits, logits + columns, edited, [](T x) { return to_float(x); });
    edit(edited, columns, *edits, row);
    return sample<float>(edited, columns, how, nullptr, row);
  }
  const float temperature = how.temperature[row], top_p = how.top_p[row], min_p = how.min_p[row];
  const int64_t top_k = how.top_k[row];
  if (temperature == 0) return best(logits, 0, columns).index;
  const int64_t room = columns + W;
  Arena arena(scratch<kThread>(4 * Arena::bytes<float>(room)));
  Tokens tokens{arena.take<float>(room), arena.take<int32_t>(room)};
  scale(logits, columns, temperature, tokens);
  if (tokens.highest == -kInf) return 0;
  Tokens spare = tokens;
  spare.x = arena.take<float>(room), spare.ids = arena.take<int32_t>(room);
  const auto probability = [&](V x) { return tokens.probability(x); };
  if (min_p > 0) tokens.drop_below(tokens.highest + std::log(min_p));
  if (top_k > 0 && top_k < tokens.count) keep_prefix(tokens, spare, double(top_k), [](V) { return set1(1); });
  if (top_p < 1) {
    const double sum = total(tokens, probability), rest = (1 - double(top_p)) * sum;
    // What is so improbable that all tokens of its kind together are less than the rest is beyond the prefix.
    tokens.drop_below(tokens.highest - float(std::log(double(tokens.count) / rest)) - 0.01f);
    keep_prefix(tokens, spare, sum - rest, probability);
  }
  return draw(tokens, mixed(uint64_t(mixed(uint64_t(how.seeds[row]))) + uint64_t(how.positions[row])));
}

}  // namespace
}  // namespace quire

using namespace quire;

void quire_sample(int32_t dtype, const void* logits, int64_t stride, const QuireSampling* how,
                  const QuireEdits* edits, int64_t* out, int64_t rows, int64_t columns) {
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
#pragma omp parallel for schedule(dynamic)
    for (int64_t r = 0; r < rows; ++r)
      out[r] = sample(static_cast<const T*>(logits) + r * stride, columns, *how, edits, r);
  });
}

void quire_argmax(int32_t dtype, const void* logits, int64_t stride, int64_t* out, int64_t rows, int64_t columns) {
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
