// A whole forward pass in one parallel region: what the operations of the other files do one by one, with barriers
// between them instead of calls. Every row's bits are those that the operations give, in any batch.
#include <chrono>
#include <deque>

#include "argmax.h"
#include "decode.h"
#include "dispatch.h"
#include "linear.h"
#include "prefill.h"
#include "rows.h"

namespace quire {
namespace {

/// Attributes the time since the last lap to a part.
class Clock {
 public:
  void lap(double& part) {
    const auto now = std::chrono::steady_clock::now();
    part += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

/// Attention's work for the layers of one window, planned once for all of them.
struct Attention {
  DecodePlan decode;
  PrefillPlan prefill;
};

/// All is T but keys and values, which are kept as S.
template <class T, class S>
class Step {
 public:
  Step(const QuireDecoder& decoder, void* const* kv, int32_t block_size, const QuireBatch& batch, T* logits,
       int threads)
      : decoder_(decoder),
        kv_(kv),
        block_size_(block_size),
        batch_(batch),
        logits_(logits),
        tokens_(int(batch.count)),
        samples_(int(batch.sample_count)),
        hidden_(int(decoder.hidden)),
        q_size_(decoder.heads * decoder.head_dim),
        qkv_size_((decoder.heads + 2 * decoder.kv_heads) * decoder.head_dim) {
    plan(threads);
    allocate();
    select_all_ = samples_ == tokens_;
    for (int i = 0; select_all_ && i < samples_; ++i) select_all_ = batch.samples[i] == i;
  }

  void run(Team& team, QuireTimes& times) {
    Clock clock;
    T *residual = residual_, *attended = attended_;
    int rows = tokens_;
    team.for_ranges(rows, [&](int64_t row, int64_t end) {
      for (; row < end; ++row) {
        T* sum = residual + row * hidden_;
        std::copy_n(static_cast<const T*>(decoder_.embedding) + batch_.tokens[row] * hidden_, hidden_, sum);
        norm(sum, decoder_.layers[0].input_norm, row);
      }
    });
    clock.lap(times.other);
    for (int i = 0; i < decoder_.num_layers; ++i) {
      const QuireLayer& layer = decoder_.layers[i];
      const bool last = i + 1 == decoder_.num_layers;
      Linear<T>(layer.qkv).run(team, x_, hidden_, rows, qkv_, qkv_size_, wide_);
      clock.lap(times.linear);
      store(team, layer, kv_[i]);
      clock.lap(times.other);
      if (last && samples_ == 0) return;
      attend(team, layer, kv_[i]);
      clock.lap(times.attention);
      if (last && !select_all_) {  // nothing after this mixes rows: only those that sample go on
        select(team);
        residual = selected_residual_, attended = qkv_, rows = samples_;
      }
      Linear<T>(layer.out).run(team, attended, q_size_, rows, y_, hidden_, wide_);
      clock.lap(times.linear);
      add_norm(team, residual, layer.post_norm, rows);
      clock.lap(times.other);
      Linear<T>(layer.gate_up).run_gated(team, x_, hidden_, rows, gate_up_, inner_, wide_);
      Linear<T>(layer.down).run(team, inner_, layer.down.inputs, rows, y_, hidden_, wide_);
      clock.lap(times.linear);
      add_norm(team, residual, last ? decoder_.norm : decoder_.layers[i + 1].input_norm, rows);
      clock.lap(times.other);
    }
    Linear<T>(decoder_.head).run(team, x_, hidden_, rows, logits_, decoder_.head.outputs, wide_);
    if (batch_.likeliest) {
      const int64_t columns = decoder_.head.outputs;
      team.for_each(samples_, [&](int64_t i) { batch_.likeliest[i] = best(logits_ + i * columns, 0, columns).index; });
    }
    clock.lap(times.head);
  }

 private:
  void plan(int threads) {
    for (int i = 0; i < decoder_.num_layers; ++i) {
      const int window = decoder_.layers[i].window;
      if (find(window)) continue;
      attention_.push_back({DecodePlan(batch_.decodes, window, decoder_.kv_heads, threads),
                            PrefillPlan(batch_.chunks, batch_.chunk_cu_seqlens, window, decoder_.heads,
                                        decoder_.kv_heads, threads)});
    }
  }

  const Attention* find(int window) const {
    for (const Attention& attention : attention_)
      if (attention.decode.window == window) return &attention;
    return nullptr;
  }

  void allocate() {
    const int64_t rows = std::max(tokens_, samples_);
    int64_t inner = 0, wide = Linear<T>(decoder_.head).wide(rows);
    size_t partials = 0;
    for (int i = 0; i < decoder_.num_layers; ++i) {
      const QuireLayer& layer = decoder_.layers[i];
      inner = std::max(inner, layer.down.inputs);
      for (const QuireLinear* linear : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
        wide = std::max(wide, Linear<T>(*linear).wide(rows));
    }
    for (const Attention& attention : attention_)
      partials = std::max(partials, attention.decode.partial_floats(decoder_.heads, decoder_.head_dim));
    const auto cut = [&](Arena arena) {
      residual_ = arena.take<T>(rows * hidden_);
      selected_residual_ = arena.take<T>(samples_ * int64_t(hidden_));
      x_ = arena.take<T>(rows * hidden_);
      y_ = arena.take<T>(rows * hidden_);
      qkv_ = arena.take<T>(rows * qkv_size_);
      attended_ = arena.take<T>(rows * q_size_);
      gate_up_ = arena.take<T>(rows * 2 * inner);
      inner_ = arena.take<T>(rows * inner);
      wide_ = arena.take<float>(wide);
      partials_ = arena.take<float>(partials);
      return arena.end();
    };
    const size_t bytes = reinterpret_cast<uintptr_t>(cut(Arena(nullptr)));
    cut(Arena(scratch<kStep>(bytes)));
  }

  void norm(const T* from, const void* weight, int64_t row) const {
    normalize(from, static_cast<const T*>(weight), decoder_.eps, x_ + row * hidden_, hidden_);
  }

  /// residual += y, and x becomes its norm.
  void add_norm(Team& team, T* residual, const void* weight, int rows) const {
    team.for_ranges(rows, [&](int64_t row, int64_t end) {
      for (; row < end; ++row) {
        add_to(residual + row * hidden_, y_ + row * hidden_, hidden_);
        norm(residual + row * hidden_, weight, row);
      }
    });
  }

  QuireCache cache(void* kv) const {
    return {kv, decoder_.dtype, decoder_.kv_heads, block_size_, decoder_.head_dim, kScaled<S>};
  }

  void store(Team& team, const QuireLayer& layer, void* kv) const {
    const Cache<S> memory(cache(kv));
    team.for_ranges(tokens_, [&](int64_t row, int64_t end) {
      for (; row < end; ++row)
        rope_store(memory, qkv_ + row * qkv_size_, decoder_.cos_sin, batch_.positions[row], batch_.slots[row],
                   decoder_.heads, static_cast<const T*>(layer.q_norm), static_cast<const T*>(layer.k_norm),
                   decoder_.eps);
    });
  }

  void attend(Team& team, const QuireLayer& layer, void* kv) const {
    const Attention& plan = *find(layer.window);
    const QuireCache memory = cache(kv);
    const QuireScores how{decoder_.scale, 0, layer.window};
    const int64_t decodes = batch_.decodes.count;
    const Decode<T, S> decode(memory, batch_.decodes, how, qkv_, qkv_size_, attended_, decoder_.heads, partials_);
    const Prefill<T, S> prefill(memory, batch_.chunks, how, batch_.chunk_cu_seqlens, qkv_ + decodes * qkv_size_,
                                qkv_size_, attended_ + decodes * q_size_, decoder_.heads);
    if (team.first()) decode.clear_empty();
    const int64_t prefills = int64_t(plan.prefill.items.size());
    team.for_each(prefills + int64_t(plan.decode.items.size()), [&](int64_t i) {
      if (i < prefills)
        prefill.run(plan.prefill.items[i]);
      else
        decode.run(plan.decode.items[i - prefills]);
    });
    decode.merge(team, plan.decode);
  }

  /// Copies the rows that sample to the front of qkv and selected_residual.
  void select(Team& team) const {
    team.for_ranges(samples_, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        std::copy_n(attended_ + batch_.samples[i] * q_size_, q_size_, qkv_ + i * q_size_);
        std::copy_n(residual_ + batch_.samples[i] * hidden_, hidden_, selected_residual_ + i * hidden_);
      }
    });
  }

  const QuireDecoder& decoder_;
  void* const* kv_;
  const int block_size_;
  const QuireBatch& batch_;
  T* logits_;
  const int tokens_, samples_, hidden_, q_size_, qkv_size_;
  bool select_all_;
  std::deque<Attention> attention_;
  T *residual_, *selected_residual_, *x_, *y_, *qkv_, *attended_, *gate_up_, *inner_;
  float *wide_, *partials_;
};

}  // namespace
}  // namespace quire

void quire_step(const QuireDecoder* decoder, void* const* kv, int32_t block_size, int32_t int8,
                const QuireBatch* batch, void* logits, QuireTimes* times) {
  using namespace quire;
  const QuireCache cache{nullptr, decoder->dtype, decoder->kv_heads, block_size, decoder->head_dim, int8};
  by_cache(cache, [&](auto type, auto stored) {
    using T = typename decltype(type)::type;
    const int threads = omp_get_max_threads();
    Step<T, typename decltype(stored)::type> step(*decoder, kv, block_size, *batch, static_cast<T*>(logits), threads);
    Team::run(threads, [&](Team& team) {
      QuireTimes unused{};
      step.run(team, team.first() ? *times : unused);
    });
  });
}
