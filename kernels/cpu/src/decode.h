// Paged attention of one new token a sequence; decode.cpp has how.
#pragma once
#include <cstring>
#include <vector>

#include "memory.h"
#include "team.h"

namespace quire {

constexpr int kChunk = 512;

/// Tokens begin .. end - 1 of a sequence for KV heads head .. head_end - 1. partial: where its results go, or -1 when
/// it is the sequence's only chunk.
struct DecodeItem {
  int32_t sequence, begin, end, head, head_end, partial;
};

/// The work of one batch for layers that share a window.
struct DecodePlan {
  int window;
  std::vector<DecodeItem> items;
  std::vector<DecodeItem> merges;  // of a sequence: partial is its first chunk's, end - begin their number
  int partials = 0;

  DecodePlan(const QuireSequences& sequences, int window, int kv_heads, int threads);

  size_t partial_floats(int heads, int head_dim) const { return size_t(partials) * heads * (head_dim + 2); }
};

/// Queries and results are T, keys and values are kept as S.
template <class T, class S = T>
class Decode {
 public:
  /// partials: memory of DecodePlan::partial_floats, shared by all threads.
  Decode(const QuireCache& cache, const QuireSequences& sequences, const QuireScores& how, const T* q,
         int64_t q_stride, T* out, int heads, float* partials)
      : cache_(cache),
        sequences_(sequences),
        how_(how),
        q_(q),
        q_stride_(q_stride),
        out_(out),
        heads_(heads),
        group_(heads / cache.kv_heads),
        dim_(cache.head_dim),
        partials_(partials) {}

  /// Zeros for sequences without tokens, which have no items.
  void clear_empty() const {
    for (int s = 0; s < sequences_.count; ++s)
      if (sequences_.seq_lens[s] <= 0) std::memset(static_cast<void*>(output(s, 0)), 0, heads_ * dim_ * sizeof(T));
  }

  void run(const DecodeItem& item) const;

  /// Joins the chunks of long sequences, when all items have run.
  void merge(Team& team, const DecodePlan& plan) const {
    if (plan.merges.empty()) return;
    team.for_each(int64_t(plan.merges.size()) * heads_,
                  [&](int64_t i) { merge(plan.merges[i / heads_], int(i % heads_)); });
  }

 private:
  template <int DIM>
  void run(const DecodeItem& item) const;
  void merge(const DecodeItem& chunks, int head) const;
  bool reads_in_order() const;
  float* partial(int index, int head) const { return partials_ + (int64_t(index) * heads_ + head) * (dim_ + 2); }
  T* output(int sequence, int head) const { return out_ + (int64_t(sequence) * heads_ + head) * dim_; }

  const Cache<S> cache_;
  const QuireSequences& sequences_;
  const QuireScores how_;
  const T* q_;
  const int64_t q_stride_;
  T* out_;
  const int heads_, group_, dim_;
  float* partials_;
};

}  // namespace quire
