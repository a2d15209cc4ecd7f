// Paged causal attention of several new tokens a sequence; prefill.cpp has how.
#pragma once
#include <vector>

#include "memory.h"
#include "product.h"
#include "team.h"

namespace quire {

constexpr int kAttentionPanel = 2 * W;

/// Tokens token .. token + tokens - 1 of a sequence's new ones, for one KV head.
struct PrefillItem {
  int32_t sequence, head, token, tokens;
  int64_t cost;
};

/// The work of one batch for layers that share a window.
struct PrefillPlan {
  int window;
  std::vector<PrefillItem> items;

  PrefillPlan(const QuireSequences& sequences, const int32_t* cu_seqlens, int window, int heads, int kv_heads,
              int threads);
};

/// Queries and results are T, keys and values are kept as S.
template <class T, class S = T>
class Prefill {
  using E = typename Entry<T>::type;  // of both sides of both products

 public:
  Prefill(const QuireCache& cache, const QuireSequences& sequences, const QuireScores& how, const int32_t* cu_seqlens,
          const T* q, int64_t q_stride, T* out, int heads)
      : cache_(cache),
        sequences_(sequences),
        how_(how),
        cu_seqlens_(cu_seqlens),
        q_(q),
        q_stride_(q_stride),
        out_(out),
        heads_(heads),
        group_(heads / cache.kv_heads),
        dim_(cache.head_dim),
        padded_((dim_ + kAttentionPanel - 1) / kAttentionPanel * kAttentionPanel) {}

  void run(const PrefillItem& item) const;

 private:
  /// A tile of keys and values, packed for the two products, and the scales of rows that have them.
  struct Tile {
    E *keys, *values;
    float *key_scales, *value_scales;
  };

  void pack(const S* const* rows, int head, int tokens, Tile& tile) const;
  template <int ROWS>
  void attend(const E* q, const Tile& tile, float* acc, float* maximum, float* denominator, int base, int tokens,
              int position, int row) const;
  template <int ROWS, int VECTORS>
  static void score(const E* q, const E* keys, int entries, float* scores);
  float soften(float* scores, const Tile& tile, int first, int last, int vectors, float& maximum, float& denominator,
               E* weights) const;
  template <int ROWS, int VECTORS>
  void accumulate(const E* weights, const E* values, int steps, float* acc, const float* shrink) const;

  int new_tokens(int sequence) const { return cu_seqlens_[sequence + 1] - cu_seqlens_[sequence]; }
  int first_key(int position) const { return how_.window > 0 ? std::max(0, position + 1 - how_.window) : 0; }

  const Cache<S> cache_;
  const QuireSequences& sequences_;
  const QuireScores how_;
  const int32_t* cu_seqlens_;
  const T* q_;
  const int64_t q_stride_;
  T* out_;
  const int heads_, group_, dim_, padded_;
};

}  // namespace quire
