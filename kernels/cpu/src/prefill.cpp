// Paged causal attention of several new tokens a sequence: a prompt, or a chunk of one after what is cached.
//
// An item of work is a KV head and a tile of query tokens, whose rows are (token, query head of the group). It walks
// the sequence's keys in tiles of kKeys tokens at fixed positions: (1) look up the tile's tokens through the block
// table and pack keys and values once for all rows, (2) partial scores of a few rows as one small matrix product,
// (3) their running maximum and denominator, (4) their weighted values as a second product. Positions of key tiles do
// not depend on the batch or on how a prompt is cut, so neither do a row's bits.
//
// Rows of 8 bits are packed without their scales, which multiply a token's scores, and its weights before (4).
//
// With AVX512-BF16, bf16 keys, values and (rounded) weights are multiplied as pairs; elsewhere all are floats.
#include "prefill.h"

#include <algorithm>

#include "dispatch.h"

namespace quire {
namespace {

constexpr int kKeys = 128;
constexpr int kRows = 96;  // of a query tile, about
constexpr int kPackRows = 8;  // packing a tile of keys and values takes about as long as so many rows of the two products

constexpr int kPanel = kAttentionPanel;

/// How a tile of T is packed for product.h.
template <class T>
struct Packing {
  using E = float;
  static constexpr int kElements = 1;

  static void query(const T* q, E* out, int dim) {
    for (int d = 0; d < dim; d += W) store(out + d, load(q + d));
  }

  /// out: panels of [dim][2 W tokens]. rows[t]: null for a token that must not be read.
  static void keys(const T* const* rows, int64_t offset, int tokens, int dim, E* out) {
    for (int t = 0; t < tokens; t += W)
      for (int d = 0; d < dim; d += W) {
        V x[W];
        for (int j = 0; j < W; ++j) x[j] = rows[t + j] ? load(rows[t + j] + offset + d) : zero();
        transpose(x);
        E* to = out + (t / kPanel * dim + d) * kPanel + t % kPanel;
        for (int j = 0; j < W; ++j) store(to + j * kPanel, x[j]);
      }
  }

  /// out: panels of [kKeys tokens][2 W of dim], zero beyond dim.
  static void values(const T* const* rows, int64_t offset, int tokens, int dim, E* out) {
    for (int t = 0; t < tokens; ++t)
      for (int d = 0; d < dim || d % kPanel; d += W)
        store(out + (d / kPanel * kKeys + t) * kPanel + d % kPanel,
              rows[t] && d < dim ? load(rows[t] + offset + d) : zero());
  }

  static void weights(V x, E* out) { store(out, x); }
};

#ifdef __AVX512BF16__
template <>
struct Packing<bf16> {
  using E = bf16x2;
  static constexpr int kElements = 2;

  static void query(const bf16* q, E* out, int dim) { std::memcpy(out, q, dim * sizeof(bf16)); }

  static void keys(const bf16* const* rows, int64_t offset, int tokens, int dim, E* out) {
    const int pairs = dim / 2;
    for (int t = 0; t < tokens; t += W)
      for (int d = 0; d < pairs; d += W) {
        const int count = std::min(W, pairs - d);
        V x[W];
        for (int j = 0; j < W; ++j)
          x[j] = rows[t + j] ? _mm512_castsi512_ps(load_pairs(rows[t + j] + offset + 2 * d, count)) : zero();
        transpose(x);
        float* to = reinterpret_cast<float*>(out + (t / kPanel * pairs + d) * kPanel + t % kPanel);
        for (int j = 0; j < count; ++j) store(to + j * kPanel, x[j]);
      }
  }

  static void values(const bf16* const* rows, int64_t offset, int tokens, int dim, E* out) {
    alignas(64) static constexpr bf16 kNothing[kPanel] = {};
    alignas(64) bf16 tail[2][kPanel] = {};
    for (int t = 0; t < tokens; t += 2)
      for (int d = 0; d < dim; d += kPanel) {
        const bf16* pair[2];
        for (int i = 0; i < 2; ++i) {
          pair[i] = rows[t + i] ? rows[t + i] + offset + d : kNothing;
          if (dim - d < kPanel) pair[i] = std::copy_n(pair[i], dim - d, tail[i]) - (dim - d);
        }
        interleave(pair[0], pair[1], out + (d / kPanel * (kKeys / 2) + t / 2) * kPanel);
      }
  }

  static void weights(V x, E* out) { store(reinterpret_cast<bf16*>(out), x); }
};
#endif

/// Rows of T with the whole numbers that scaled rows hold, in memory that the next call reuses; and the scales.
template <class T>
const T* const* unscaled(const i8* const* rows, int64_t offset, int tokens, int dim, float* scales) {
  Arena arena(scratch<kUnscaled>(Arena::bytes<const T*>(kKeys) + Arena::bytes<T>(size_t(kKeys) * dim)));
  const T** plain = arena.take<const T*>(kKeys);
  T* to = arena.take<T>(size_t(kKeys) * dim);
  for (int t = 0; t < tokens; ++t, to += dim) {
    plain[t] = rows[t] ? to : nullptr;
    scales[t] = rows[t] ? scale_of(rows[t] + offset, dim) : 0;
    for (int d = 0; rows[t] && d < dim; d += W) store(to + d, load(rows[t] + offset + d));
  }
  return plain;
}

}  // namespace

PrefillPlan::PrefillPlan(const QuireSequences& sequences, const int32_t* cu_seqlens, int window_, int heads,
                         int kv_heads, int threads)
    : window(window_) {
  const int group = heads / kv_heads;
  int64_t rows = 0;
  for (int s = 0; s < sequences.count; ++s) rows += int64_t(cu_seqlens[s + 1] - cu_seqlens[s]) * heads;
  // Smaller tiles share work better among threads; but each packs all keys and values again.
  const auto busiest = [&](int64_t tile) {
    return ((rows + tile - 1) / tile + threads - 1) / threads * (tile + kPackRows);
  };
  int64_t wanted = kRows;
  for (int64_t smaller = kRows / 2; smaller >= kTileRows; smaller /= 2)
    if (busiest(smaller) < busiest(wanted)) wanted = smaller;
  const int tile = std::max(1, int(wanted) / group);
  for (int s = 0; s < sequences.count; ++s) {
    const int fresh = cu_seqlens[s + 1] - cu_seqlens[s], start = sequences.seq_lens[s] - fresh;
    for (int token = 0; token < fresh; token += tile) {
      const int tokens = std::min(tile, fresh - token);
      const int end = start + token + tokens, begin = window > 0 ? std::max(0, start + token + 1 - window) : 0;
      for (int head = 0; head < kv_heads; ++head)
        items.push_back({s, head, token, tokens, int64_t(end - begin) * tokens});
    }
  }
  std::stable_sort(items.begin(), items.end(), [](const PrefillItem& a, const PrefillItem& b) { return a.cost > b.cost; });
}

template <class T, class S>
void Prefill<T, S>::run(const PrefillItem& item) const {
  const int rows = item.tokens * group_, entries = dim_ / Packing<T>::kElements;
  const int position = sequences_.seq_lens[item.sequence] - new_tokens(item.sequence) + item.token;
  const int64_t first_token = cu_seqlens_[item.sequence] + item.token;
  const int32_t* table = sequences_.block_table + item.sequence * sequences_.table_stride;

  const size_t packed = size_t(kKeys) * padded_;
  Arena arena(scratch<kThread>(Arena::bytes<E>(size_t(rows) * entries) + 2 * Arena::bytes<E>(packed) +
                               Arena::bytes<float>(size_t(rows) * padded_) + 2 * Arena::bytes<float>(rows) +
                               2 * Arena::bytes<float>(kKeys)));
  E* q = arena.take<E>(size_t(rows) * entries);
  Tile tile{arena.take<E>(packed), arena.take<E>(packed), arena.take<float>(kKeys), arena.take<float>(kKeys)};
  float* acc = arena.take<float>(size_t(rows) * padded_);
  float* maximum = arena.take<float>(rows);
  float* denominator = arena.take<float>(rows);
  for (int row = 0; row < rows; ++row)
    Packing<T>::query(q_ + (first_token + row / group_) * q_stride_ + (item.head * group_ + row % group_) * dim_,
             q + row * entries, dim_);
  std::fill_n(acc, size_t(rows) * padded_, 0.f);
  std::fill_n(maximum, rows, -kInf);
  std::fill_n(denominator, rows, 0.f);

  const int begin = first_key(position), end = position + item.tokens;
  for (int base = begin / kKeys * kKeys; base < end; base += kKeys) {
    const int tokens = std::min(kKeys, end - base), padded = (tokens + kPanel - 1) / kPanel * kPanel;
    const S* looked_up[kKeys];
    for (int t = 0; t < padded; ++t)
      looked_up[t] = t < tokens && base + t >= begin ? cache_.token(table, base + t) : nullptr;
    pack(looked_up, item.head, padded, tile);
    in_tiles(rows, [&](int row, int size) {
      const int last = position + (row + size - 1) / group_;  // the last query's position: no key after it matters
      if (last < base) return;
      by_rows(size, [&]<int ROWS>() {
        attend<ROWS>(q + row * entries, tile, acc + row * padded_, maximum + row, denominator + row, base,
                     std::min(tokens, last + 1 - base), position, row);
      });
    });
  }
  for (int row = 0; row < rows; ++row) {
    T* to = out_ + ((first_token + row / group_) * heads_ + item.head * group_ + row % group_) * dim_;
    const V factor = set1(denominator[row] > 0 ? 1 / denominator[row] : 0);
    for (int d = 0; d < dim_; d += W) store(to + d, mul(load(acc + row * padded_ + d), factor));
  }
}

/// Packs one head's keys and values of the tokens with these rows (null: not to be read).
template <class T, class S>
void Prefill<T, S>::pack(const S* const* rows, int head, int tokens, Tile& tile) const {
  const int64_t keys = head * cache_.head_stride, values = cache_.values + keys;
  if constexpr (kScaled<S>) {
    Packing<T>::keys(unscaled<T>(rows, keys, tokens, dim_, tile.key_scales), 0, tokens, dim_, tile.keys);
    Packing<T>::values(unscaled<T>(rows, values, tokens, dim_, tile.value_scales), 0, tokens, dim_, tile.values);
  } else {
    Packing<T>::keys(rows, keys, tokens, dim_, tile.keys);
    Packing<T>::values(rows, values, tokens, dim_, tile.values);
  }
}

/// ROWS rows of a tile against `tokens` keys that begin at position `base`.
template <class T, class S>
template <int ROWS>
void Prefill<T, S>::attend(const E* q, const Tile& tile, float* acc, float* maximum, float* denominator, int base,
                           int tokens, int position, int row) const {
  alignas(64) float scores[ROWS][kKeys];
  alignas(64) E weights[ROWS][kKeys / Packing<T>::kElements];
  const int entries = dim_ / Packing<T>::kElements, vectors = (tokens + W - 1) / W;
  int v = 0;
  for (; v + kTileVectors <= vectors; v += kTileVectors)
    score<ROWS, kTileVectors>(q, tile.keys + v * W * entries, entries, &scores[0][v * W]);
  for (; v < vectors; v += 2) score<ROWS, 2>(q, tile.keys + v * W * entries, entries, &scores[0][v * W]);

  float shrink[ROWS];
  for (int i = 0; i < ROWS; ++i) {
    const int at = position + (row + i) / group_;
    const int first = std::max(0, first_key(at) - base), last = std::min(tokens, at + 1 - base);
    shrink[i] = soften(scores[i], tile, first, last, vectors, maximum[i], denominator[i], weights[i]);
  }

  const int steps = (vectors * W + Packing<T>::kElements - 1) / Packing<T>::kElements;
  const int columns = padded_ / W;
  int c = 0;
  for (; c + kTileVectors <= columns; c += kTileVectors)
    accumulate<ROWS, kTileVectors>(weights[0], tile.values + c * W * (kKeys / Packing<T>::kElements), steps,
                                   acc + c * W, shrink);
  for (; c < columns; c += 2)
    accumulate<ROWS, 2>(weights[0], tile.values + c * W * (kKeys / Packing<T>::kElements), steps, acc + c * W, shrink);
}

template <class T, class S>
template <int ROWS, int VECTORS>
void Prefill<T, S>::score(const E* q, const E* keys, int entries, float* scores) {
  V c[ROWS][VECTORS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < VECTORS; ++j) c[i][j] = zero();
  multiply<2, ROWS, VECTORS, E>(c, q, entries, keys, int64_t(entries) * kPanel, entries);
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < VECTORS; ++j) store(scores + i * kKeys + j * W, c[i][j]);
}

/// Weights of one row's keys first .. last - 1 relative to its running maximum; 0 for the others. Returns what
/// earlier sums must be multiplied by.
template <class T, class S>
float Prefill<T, S>::soften(float* scores, const Tile& tile, int first, int last, int vectors, float& maximum,
                            float& denominator, E* weights) const {
  const bool whole = first <= 0 && last >= vectors * W;
  const V scale = set1(how_.softcap > 0 ? how_.scale / how_.softcap : how_.scale * kLog2e);
  V highest = set1(-kInf);
  for (int v = 0; v < vectors; ++v) {
    V s = mul(load(scores + v * W), scale);
    if constexpr (kScaled<S>) s = mul(s, load(tile.key_scales + v * W));
    if (how_.softcap > 0) s = mul(tanh(s), set1(how_.softcap * kLog2e));
    if (!whole) s = keep(s, first - v * W, last - v * W, -kInf);
    store(scores + v * W, s);
    highest = max(highest, s);
  }
  const float raised = std::max(maximum, hmax(highest));
  const float shrink = raised > maximum ? std::exp2(maximum - raised) : 1.f;
  const V offset = set1(raised == -kInf ? 0.f : raised);
  V sum = zero();
  for (int v = 0; v < vectors; ++v) {
    V weight = exp2(sub(load(scores + v * W), offset));
    sum = add(sum, weight);
    if constexpr (kScaled<S>) weight = mul(weight, load(tile.value_scales + v * W));
    Packing<T>::weights(weight, weights + v * W / Packing<T>::kElements);
  }
  maximum = raised;
  denominator = denominator * shrink + hsum(sum);
  return shrink;
}

template <class T, class S>
template <int ROWS, int VECTORS>
void Prefill<T, S>::accumulate(const E* weights, const E* values, int steps, float* acc, const float* shrink) const {
  constexpr int kStride = kKeys / Packing<T>::kElements;
  V c[ROWS][VECTORS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < VECTORS; ++j) c[i][j] = mul(load(acc + i * padded_ + j * W), set1(shrink[i]));
  multiply<2, ROWS, VECTORS, E>(c, weights, kStride, values, int64_t(kStride) * kPanel, steps);
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < VECTORS; ++j) store(acc + i * padded_ + j * W, c[i][j]);
}

template class Prefill<float>;
template class Prefill<bf16>;
template class Prefill<f16>;
template class Prefill<float, i8>;
template class Prefill<bf16, i8>;
template class Prefill<f16, i8>;

}  // namespace quire

using namespace quire;

void quire_paged_prefill(const QuireCache* cache, const QuireSequences* sequences, const QuireScores* scores,
                         const int32_t* cu_seqlens, const void* q, int64_t q_stride, void* out, int32_t heads) {
  by_cache(*cache, [&](auto type, auto stored) {
    using T = typename decltype(type)::type;
    const PrefillPlan plan(*sequences, cu_seqlens, scores->window, heads, cache->kv_heads, omp_get_max_threads());
    const Prefill<T, typename decltype(stored)::type> prefill(
        *cache, *sequences, *scores, cu_seqlens, static_cast<const T*>(q), q_stride, static_cast<T*>(out), heads);
    Team::run(omp_get_max_threads(), [&](Team& team) {
      team.for_each(int64_t(plan.items.size()), [&](int64_t i) { prefill.run(plan.items[i]); });
    });
  });
}
