// Paged attention of one new token a sequence.
//
// A sequence is cut into chunks of kChunk tokens, whatever the batch: a chunk is one item of work, threads take items
// as they become free, and partial results of a sequence are merged in ascending order. So a row has the same bits
// alone and in any batch. Within an item, tiles of a block (or of a part of a large one, or several small ones):
// (1) look up each token's row through the block table, (2) partial scores of all query heads against the tile's keys,
// (3) running maximum and denominator, (4) accumulate weighted values. Each key and value is read from memory once for
// its whole group of query heads. (2) and (4) ask for the same rows of the next tile, into L2: blocks are scattered, and
// hardware prefetchers cannot follow. They can where a block follows its predecessor, and are faster then.
//
// Rows of 8 bits are multiplied as integers. For (2) a query is rounded to 16 bits, with a scale of its own; the sums are
// exact, and the scales of key and query multiply them. For (4) a tile's weights, times the scales of their values, are
// rounded to 16 bits relative to the largest. So what is added to the rounding of memory itself is some 2^-16.
//
// Scores are kept in units of log2, which saves exp a multiplication.
#include "decode.h"

#include <algorithm>

#include "dispatch.h"
#include "vec.h"

namespace quire {
namespace {

constexpr int kTile = 64;      // most tokens of a tile
constexpr int kLeastTile = 16;  // and fewest, but for a sequence's last
constexpr int kMaxRows = 4;  // query heads that share one pass over a tile

/// How keys, kept as S, meet queries: a query is kept as `row` of Q. Sum holds sums of products lane by lane.
template <class T, class S>
struct Product {
  using Q = float;
  using Reg = Two;
  using Sum = V;
  static int row(int dim) { return dim; }
  static void prepare(const T* q, Q* out, int dim) {
    int d = 0;
    for (; d + 2 * W <= dim; d += 2 * W) {
      const Two x = load2(q + d);
      store(out + d, x.a), store(out + d + W, x.b);
    }
    if (d < dim) store(out + d, load(q + d));
  }
  static Reg query(const Q* q) { return {load(q), load(q + W)}; }
  static Reg query_half(const Q* q) { return {load(q), zero()}; }
  static Reg key(const S* k) { return load2(k); }
  static Reg key_half(const S* k) { return {load(k), zero()}; }
  static Sum nothing() { return zero(); }
  static V dot(V acc, Reg k, Reg q) { return fma(k.b, q.b, fma(k.a, q.a, acc)); }
  static V dot_half(V acc, Reg k, Reg q) { return fma(k.a, q.a, acc); }
};

#ifdef __AVX512BF16__
template <>
struct Product<bf16, bf16> {
  using Q = bf16;
  using Reg = __m512i;
  using Sum = V;
  static int row(int dim) { return dim; }
  static void prepare(const bf16* q, Q* out, int dim) { std::copy(q, q + dim, out); }
  static Reg query(const Q* q) { return load_pairs(q); }
  static Reg query_half(const Q* q) { return load_pairs(q, W / 2); }
  static Reg key(const bf16* k) { return load_pairs(k); }
  static Reg key_half(const bf16* k) { return load_pairs(k, W / 2); }
  static Sum nothing() { return zero(); }
  static V dot(V acc, Reg k, Reg q) { return dot_pairs(acc, k, q); }
  static V dot_half(V acc, Reg k, Reg q) { return dot_pairs(acc, k, q); }
};
#endif

/// Rounds x [count], padded to whole vectors, to 16 bits; returns the scale of the integers.
template <class T>
inline float to_words(const T* x, int count, int16_t* out) {
  V largest = zero();
  for (int i = 0; i < count; i += W) largest = max(largest, abs(load(x + i)));
  const float scale = hmax(largest) / 32767;
  const V inverse = set1(scale > 0 ? 1 / scale : 0);
  for (int i = 0; i < count; i += W) store_words(out + i, mul(load(x + i), inverse));
  return scale;
}

/// A query is kept as 16-bit integers and their scale.
template <class T>
struct Product<T, i8> {
  using Q = int16_t;
  using Reg = I;
  using Sum = I;
  static int padded(int dim) { return (dim + 2 * W - 1) / (2 * W) * (2 * W); }
  static int row(int dim) { return padded(dim) + int(sizeof(float) / sizeof(Q)); }
  static void prepare(const T* q, Q* out, int dim) {
    const float scale = to_words(q, dim, out);
    std::fill_n(out + dim, padded(dim) - dim, Q(0));
    std::memcpy(out + padded(dim), &scale, sizeof scale);
  }
  static float scale(const Q* q, int dim) {
    float scale;
    std::memcpy(&scale, q + padded(dim), sizeof scale);
    return scale;
  }
  static Reg query(const Q* q) { return load_words(q); }
  static Reg query_half(const Q* q) { return load_words(q); }
  static Reg key(const i8* k) { return load_words(k); }
  static Reg key_half(const i8* k) { return load_words_half(k); }
  static Sum nothing() { return no_ints(); }
  static Sum dot(Sum acc, Reg k, Reg q) { return dot_words(acc, k, q); }
  static Sum dot_half(Sum acc, Reg k, Reg q) { return dot_words(acc, k, q); }
};

/// The rows of a tile's tokens (head 0's keys), padded to a whole vector by repeating the last.
template <class S>
struct Tile {
  const S* rows[kTile];
  int tokens = 0;

  void look_up(const Cache<S>& cache, const int32_t* table, int begin, int end) {
    tokens = std::max(0, end - begin);
    for (int t = 0; t < tokens; ++t) rows[t] = cache.token(table, begin + t);
    for (int t = tokens; t % W; ++t) rows[t] = rows[tokens - 1];
  }

  /// x with lane i multiplied by the scale of the row of `dim` elements at rows[t + i] + offset.
  V scaled(V x, int t, int64_t offset, int dim) const {
    alignas(64) float scales[W];
    for (int i = 0; i < W; ++i) scales[i] = scale_of(rows[t + i] + offset, dim);
    return mul(x, load(scales));
  }
};

/// Reads `dim` elements of a row, and what may be the scale behind them, ahead of their use.
template <class S>
inline void prefetch(const S* row, int dim) {
  for (int byte = 0; byte < (dim + kScaleElements<S>) * int(sizeof(S)); byte += 64)
    _mm_prefetch(reinterpret_cast<const char*>(row) + byte, _MM_HINT_T1);
}

/// scores[r][t] = q[r] . row t
template <class T, class S, int R, int DIM>
void score(const typename Product<T, S>::Q* q, const Tile<S>& tile, int64_t offset, int dim, const Tile<S>* next,
           float (*scores)[kTile]) {
  using P = Product<T, S>;
  if (DIM) dim = DIM;
  const int q_row = P::row(dim);
  for (int t = 0; t < tile.tokens; t += W) {
    V partial[R][W];
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      const S* key = tile.rows[t + j] + offset;
      if (next && t + j < next->tokens) prefetch(next->rows[t + j] + offset, dim);
      typename P::Sum acc[R];
      for (int r = 0; r < R; ++r) acc[r] = P::nothing();
      int d = 0;
      for (; d + 2 * W <= dim; d += 2 * W) {
        const auto k = P::key(key + d);
        for (int r = 0; r < R; ++r) acc[r] = P::dot(acc[r], k, P::query(q + r * q_row + d));
      }
      if (d < dim) {
        const auto k = P::key_half(key + d);
        for (int r = 0; r < R; ++r) acc[r] = P::dot_half(acc[r], k, P::query_half(q + r * q_row + d));
      }
      for (int r = 0; r < R; ++r) {
        if constexpr (kScaled<S>)
          partial[r][j] = to_floats(acc[r]);
        else
          partial[r][j] = acc[r];
      }
    }
    for (int r = 0; r < R; ++r) {
      V sums = hsums(partial[r]);
      if constexpr (kScaled<S>) sums = mul(tile.scaled(sums, t, offset, dim), set1(P::scale(q + r * q_row, dim)));
      store(scores[r] + t, sums);
    }
  }
}

/// Scales one row's scores, makes them weights relative to the running maximum, and updates maximum and denominator.
/// Returns what earlier sums must be multiplied by.
inline float soften(float* scores, int tokens, const QuireScores& how, float& maximum, float& denominator) {
  V highest = set1(-kInf);
  for (int t = 0; t < tokens; t += W) {
    V s = load(scores + t);
    if (how.softcap > 0)
      s = mul(tanh(mul(s, set1(how.scale / how.softcap))), set1(how.softcap * kLog2e));
    else
      s = mul(s, set1(how.scale * kLog2e));
    if (tokens - t < W) s = keep(s, 0, tokens - t, -kInf);
    store(scores + t, s);
    highest = max(highest, s);
  }
  const float raised = std::max(maximum, hmax(highest));
  const float shrink = raised > maximum ? std::exp2(maximum - raised) : 1.f;
  V sum = zero();
  for (int t = 0; t < tokens; t += W) {
    const V weight = exp2(sub(load(scores + t), set1(raised)));
    store(scores + t, weight);
    sum = add(sum, weight);
  }
  maximum = raised;
  denominator = denominator * shrink + hsum(sum);
  return shrink;
}

/// acc[r][0 .. 2 W PAIRS) = shrink[r] acc[r] + sum over t of weights[r][t] value row t, in load2's order.
template <class S, int R, int PAIRS>
inline void accumulate_panel(float* acc, int dim, const Tile<S>& tile, int64_t offset, const Tile<S>* next,
                             const float (*weights)[kTile], const float* shrink) {
  V sum[R][2 * PAIRS];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2 * PAIRS; ++i) sum[r][i] = mul(load(acc + r * dim + i * W), set1(shrink[r]));
  for (int t = 0; t < tile.tokens; ++t) {
    const S* value = tile.rows[t] + offset;
    if (next && t < next->tokens) prefetch(next->rows[t] + offset, 2 * W * PAIRS);
    V weight[R];
    for (int r = 0; r < R; ++r) weight[r] = set1(weights[r][t]);
    for (int i = 0; i < PAIRS; ++i) {
      const Two x = load2(value + 2 * W * i);
      for (int r = 0; r < R; ++r) {
        sum[r][2 * i] = fma(weight[r], x.a, sum[r][2 * i]);
        sum[r][2 * i + 1] = fma(weight[r], x.b, sum[r][2 * i + 1]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2 * PAIRS; ++i) store(acc + r * dim + i * W, sum[r][i]);
}

template <class S, int R>
inline void accumulate_half(float* acc, int dim, const Tile<S>& tile, int64_t offset, const float (*weights)[kTile],
                            const float* shrink) {
  V sum[R];
  for (int r = 0; r < R; ++r) sum[r] = mul(load(acc + r * dim), set1(shrink[r]));
  for (int t = 0; t < tile.tokens; ++t) {
    const V x = load(tile.rows[t] + offset);
    for (int r = 0; r < R; ++r) sum[r] = fma(set1(weights[r][t]), x, sum[r]);
  }
  for (int r = 0; r < R; ++r) store(acc + r * dim, sum[r]);
}

/// Pairs of accumulators a row that fit the registers.
inline constexpr int panel_pairs(int rows) {
  if (W == 16) return rows <= 3 ? 4 : 2;
  return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

/// accumulate_panel of integers: rows and weights, which are `unit[r]` times what they stand for; pairs of tokens at once.
template <int R, int PAIRS>
inline void accumulate_words(float* acc, int dim, const Tile<i8>& tile, int64_t offset, const Tile<i8>* next,
                             const int16_t (*weights)[kTile], const float* unit, const float* shrink) {
  TwoInts sum[R][PAIRS];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < PAIRS; ++i) sum[r][i] = {no_ints(), no_ints()};
  for (int t = 0; t < tile.tokens; t += 2) {
    const i8 *first = tile.rows[t] + offset, *second = tile.rows[t + 1] + offset;
    if (next && t < next->tokens) {
      prefetch(next->rows[t] + offset, 2 * W * PAIRS);
      prefetch(next->rows[t + 1] + offset, 2 * W * PAIRS);
    }
    I weight[R];
    for (int r = 0; r < R; ++r) weight[r] = broadcast_words(weights[r] + t);
    for (int i = 0; i < PAIRS; ++i) {
      const TwoInts x = interleave_words(load_words(first + 2 * W * i), load_words(second + 2 * W * i));
      for (int r = 0; r < R; ++r) {
        sum[r][i].a = dot_words(sum[r][i].a, x.a, weight[r]);
        sum[r][i].b = dot_words(sum[r][i].b, x.b, weight[r]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < PAIRS; ++i) {
      const Two x = ordered(sum[r][i]);
      float* to = acc + r * dim + 2 * W * i;
      store(to, fma(x.a, set1(unit[r]), mul(load(to), set1(shrink[r]))));
      store(to + W, fma(x.b, set1(unit[r]), mul(load(to + W), set1(shrink[r]))));
    }
}

/// Adds one tile's weighted values, of rows of S, to acc.
template <int R, int DIM>
void accumulate(float* acc, int dim, const Tile<i8>& tile, int64_t offset, const Tile<i8>* next,
                const float (*weights)[kTile], const float* shrink) {
  if (DIM) dim = DIM;
  constexpr int PAIRS = DIM ? std::min(panel_pairs(R), DIM / (2 * W)) : panel_pairs(R);
  alignas(64) float scaled[R][kTile];
  alignas(64) int16_t words[R][kTile];
  float unit[R];
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < tile.tokens; t += W)
      store(scaled[r] + t, tile.scaled(load(weights[r] + t), t, offset, dim));
    unit[r] = to_words(scaled[r], tile.tokens, words[r]);
  }
  int d = 0;
  for (; d + 2 * W * PAIRS <= dim; d += 2 * W * PAIRS)
    accumulate_words<R, PAIRS>(acc + d, dim, tile, offset + d, next, words, unit, shrink);
  for (; d + 2 * W <= dim; d += 2 * W)
    accumulate_words<R, 1>(acc + d, dim, tile, offset + d, next, words, unit, shrink);
  if (d < dim) accumulate_half<i8, R>(acc + d, dim, tile, offset + d, scaled, shrink);
}

template <int R, int DIM, class S>
void accumulate(float* acc, int dim, const Tile<S>& tile, int64_t offset, const Tile<S>* next,
                const float (*weights)[kTile], const float* shrink) {
  if (DIM) dim = DIM;
  constexpr int PAIRS = DIM ? std::min(panel_pairs(R), DIM / (2 * W)) : panel_pairs(R);
  int d = 0;
  for (; d + 2 * W * PAIRS <= dim; d += 2 * W * PAIRS)
    accumulate_panel<S, R, PAIRS>(acc + d, dim, tile, offset + d, next, weights, shrink);
  for (; d + 2 * W <= dim; d += 2 * W)
    accumulate_panel<S, R, 1>(acc + d, dim, tile, offset + d, next, weights, shrink);
  if (d < dim) accumulate_half<S, R>(acc + d, dim, tile, offset + d, weights, shrink);
}

/// Running results of the query heads of one item, whose queries are kept as Q, and a tile's weights.
template <class Q>
struct State {
  Q* q;
  float *acc, *maximum, *denominator, *shrink;
  float (*weights)[kTile];
};

/// Calls f.template operator()<R>(first row) for a group of query heads cut into passes of R, nearly equal in size.
template <class F>
void in_passes(int row, int group, F f) {
  const int passes = (group + kMaxRows - 1) / kMaxRows;
  for (int pass = 0; pass < passes; ++pass) {
    const int rows = group / passes + (pass < group % passes);
    switch (rows) {
      case 1:
        f.template operator()<1>(row);
        break;
      case 2:
        f.template operator()<2>(row);
        break;
      case 3:
        f.template operator()<3>(row);
        break;
      default:
        f.template operator()<4>(row);
    }
    row += rows;
  }
}

/// Writes acc (in the order of load2 of S) times `factor` as T.
template <class S, class T>
void finish(const float* acc, float factor, int dim, T* out) {
  int d = 0;
  for (; !kScaled<S> && d + 2 * W <= dim; d += 2 * W)
    store2(out + d, {mul(load(acc + d), set1(factor)), mul(load(acc + d + W), set1(factor))});
  for (; d < dim; d += W) store(out + d, mul(load(acc + d), set1(factor)));
}

}  // namespace

DecodePlan::DecodePlan(const QuireSequences& sequences, int window_, int kv_heads, int threads) : window(window_) {
  const auto first = [&](int length) { return window > 0 ? std::max(0, length - window) : 0; };
  int chunks = 0;
  for (int s = 0; s < sequences.count; ++s) {
    const int length = sequences.seq_lens[s];
    if (length > 0) chunks += (length - 1) / kChunk - first(length) / kChunk + 1;
  }
  // Heads of a token lie near each other, so they are kept together unless threads would be idle.
  int heads = kv_heads;
  while (heads > 1 && chunks * ((kv_heads + heads - 1) / heads) < 3 * threads) heads = (heads + 1) / 2;
  for (int s = 0; s < sequences.count; ++s) {
    const int length = sequences.seq_lens[s], begin = first(length);
    if (length <= 0) continue;
    const int from = begin / kChunk, to = (length - 1) / kChunk + 1;
    const bool cut = to - from > 1;
    if (cut) merges.push_back({s, from, to, 0, kv_heads, partials});
    for (int chunk = from; chunk < to; ++chunk)
      for (int head = 0; head < kv_heads; head += heads)
        items.push_back({s, std::max(begin, chunk * kChunk), std::min(length, (chunk + 1) * kChunk), head,
                         std::min(kv_heads, head + heads), cut ? partials + chunk - from : -1});
    if (cut) partials += to - from;
  }
  // Longest first, so that threads end together.
  std::stable_sort(items.begin(), items.end(),
                   [](const DecodeItem& a, const DecodeItem& b) { return a.end - a.begin > b.end - b.begin; });
}

template <class T, class S>
void Decode<T, S>::run(const DecodeItem& item) const {
  switch (dim_) {
    case 64:
      return run<64>(item);
    case 128:
      return run<128>(item);
    default:
      return run<0>(item);
  }
}

/// Whether a head's values are read in one pass over whole rows, so that a block is read from end to end.
template <class T, class S>
bool Decode<T, S>::reads_in_order() const {
  const int passes = (group_ + kMaxRows - 1) / kMaxRows, rows = (group_ + passes - 1) / passes;
  return passes == 1 && dim_ <= 2 * W * panel_pairs(rows);
}

template <class T, class S>
template <int DIM>
void Decode<T, S>::run(const DecodeItem& item) const {
  using Q = typename Product<T, S>::Q;
  const int rows = (item.head_end - item.head) * group_, first = item.head * group_;
  const int q_row = Product<T, S>::row(dim_);
  Arena arena(scratch<kThread>(Arena::bytes<Q>(rows * q_row) + Arena::bytes<float>(rows * dim_) +
                               3 * Arena::bytes<float>(rows) + Arena::bytes<float>(rows * kTile)));
  State<Q> state;
  state.q = arena.take<Q>(rows * q_row);
  state.acc = arena.take<float>(rows * dim_);
  state.maximum = arena.take<float>(rows);
  state.denominator = arena.take<float>(rows);
  state.shrink = arena.take<float>(rows);
  state.weights = reinterpret_cast<float(*)[kTile]>(arena.take<float>(rows * kTile));
  for (int r = 0; r < rows; ++r)
    Product<T, S>::prepare(q_ + item.sequence * q_stride_ + (first + r) * dim_, state.q + r * q_row, dim_);
  std::fill_n(state.acc, rows * dim_, 0.f);
  std::fill_n(state.maximum, rows, -kInf);
  std::fill_n(state.denominator, rows, 0.f);

  const int32_t* table = sequences_.block_table + item.sequence * sequences_.table_stride;
  const int block = cache_.mask + 1, size = std::clamp(block, kLeastTile, kTile);
  const auto look_up = [&](Tile<S>& tile, int begin) {
    tile.look_up(cache_, table, begin, std::min(begin + size, item.end));
  };
  Tile<S> tiles[2];
  look_up(tiles[0], item.begin);
  for (int begin = item.begin, i = 0; begin < item.end; begin += size, i ^= 1) {
    const Tile<S>& tile = tiles[i];
    Tile<S>& next = tiles[i ^ 1];
    look_up(next, begin + size);
    const bool follows = next.tokens > 0 && size == block && reads_in_order() &&
                         next.rows[0] - tile.rows[0] == cache_.block_stride;
    const Tile<S>* ahead = next.tokens > 0 && !follows ? &next : nullptr;
    // All heads' keys, then all heads' values: that is how they lie in a block.
    for (int head = 0, row = 0; row < rows; ++head, row += group_)
      in_passes(row, group_, [&, ahead = ahead]<int R>(int r) mutable {
        score<T, S, R, DIM>(state.q + r * q_row, tile, (item.head + head) * cache_.head_stride, dim_, ahead,
                            state.weights + r);
        ahead = nullptr;  // the first pass has asked for the rows
      });
    for (int r = 0; r < rows; ++r)
      state.shrink[r] = soften(state.weights[r], tile.tokens, how_, state.maximum[r], state.denominator[r]);
    for (int head = 0, row = 0; row < rows; ++head, row += group_)
      in_passes(row, group_, [&, ahead = ahead]<int R>(int r) mutable {
        accumulate<R, DIM>(state.acc + r * dim_, dim_, tile,
                           cache_.values + (item.head + head) * cache_.head_stride, ahead, state.weights + r,
                           state.shrink + r);
        ahead = nullptr;
      });
  }
  for (int r = 0; r < rows; ++r) {
    if (item.partial < 0) {
      finish<S>(state.acc + r * dim_, 1 / state.denominator[r], dim_, output(item.sequence, first + r));
      continue;
    }
    float* p = partial(item.partial, first + r);
    std::copy_n(state.acc + r * dim_, dim_, p);
    p[dim_] = state.maximum[r];
    p[dim_ + 1] = state.denominator[r];
  }
}

template <class T, class S>
void Decode<T, S>::merge(const DecodeItem& chunks, int head) const {
  const int count = chunks.end - chunks.begin;
  float maximum = -kInf, denominator = 0;
  for (int i = 0; i < count; ++i) maximum = std::max(maximum, partial(chunks.partial + i, head)[dim_]);
  float* sum = partial(chunks.partial, head);
  for (int i = 0; i < count; ++i) {
    const float* p = partial(chunks.partial + i, head);
    const float share = std::exp2(p[dim_] - maximum);
    denominator += share * p[dim_ + 1];
    for (int d = 0; d < dim_; d += W) {
      const V scaled = mul(load(p + d), set1(share));
      store(sum + d, i ? add(load(sum + d), scaled) : scaled);
    }
  }
  finish<S>(sum, 1 / denominator, dim_, output(chunks.sequence, head));
}

template class Decode<float>;
template class Decode<bf16>;
template class Decode<f16>;
template class Decode<float, i8>;
template class Decode<bf16, i8>;
template class Decode<f16, i8>;

}  // namespace quire

using namespace quire;

void quire_paged_decode(const QuireCache* cache, const QuireSequences* sequences, const QuireScores* scores,
                        const void* q, int64_t q_stride, void* out, int32_t heads) {
  by_cache(*cache, [&](auto type, auto stored) {
    using T = typename decltype(type)::type;
    using S = typename decltype(stored)::type;
    const DecodePlan plan(*sequences, scores->window, cache->kv_heads, omp_get_max_threads());
    float* partials = static_cast<float*>(
        scratch<kShared>(plan.partial_floats(heads, cache->head_dim) * sizeof(float)));
    const Decode<T, S> decode(*cache, *sequences, *scores, static_cast<const T*>(q), q_stride, static_cast<T*>(out),
                              heads, partials);
    decode.clear_empty();
    Team::run(omp_get_max_threads(), [&](Team& team) {
      team.for_each(int64_t(plan.items.size()), [&](int64_t i) { decode.run(plan.items[i]); });
      decode.merge(team, plan);
    });
  });
}
