// KV memory as the kernels walk it, and memory of their own.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#include "kernels.h"
#include "types.h"

namespace quire {

/// Whether rows of S end with a scale, and how many elements it takes.
template <class S>
constexpr bool kScaled = std::is_same_v<S, i8>;
template <class S>
constexpr int kScaleElements = kScaled<S> ? sizeof(float) / sizeof(S) : 0;

/// One layer's KV, in rows of `row` elements. A token's keys of all heads are `head_stride` apart, its values `values`
/// further.
template <class T>
struct Cache {
  T* data;
  int kv_heads, head_dim, row, shift, mask;
  int64_t head_stride, values, block_stride;

  explicit Cache(const QuireCache& c)
      : data(static_cast<T*>(c.data)),
        kv_heads(c.kv_heads),
        head_dim(c.head_dim),
        row(c.head_dim + kScaleElements<T>),
        shift(__builtin_ctz(unsigned(c.block_size))),
        mask(c.block_size - 1),
        head_stride(int64_t(c.block_size) * row),
        values(c.kv_heads * head_stride),
        block_stride(2 * values) {}

  /// Head 0's key of the token at `position` of the sequence with this block table: the look-up of paged attention.
  T* token(const int32_t* table, int64_t position) const {
    return data + table[position >> shift] * block_stride + (position & mask) * row;
  }
  T* slot(int64_t slot) const { return data + (slot >> shift) * block_stride + (slot & mask) * row; }
};

/// The scale behind a row of `dim` elements.
inline float scale_of(const i8* row, int dim) {
  float scale;
  std::memcpy(&scale, row + dim, sizeof scale);
  return scale;
}

/// Memory of the calling thread, kept between calls and grown as needed. Each USE is one buffer.
template <int USE>
inline void* scratch(size_t bytes) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local size_t size = 0;
  if (bytes > size) {
    size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    memory.reset(std::aligned_alloc(4096, size));
    if (!memory) throw std::bad_alloc();
  }
  return memory.get();
}

enum ScratchUse { kShared, kThread, kUnscaled, kEdited, kStep };

/// Cuts a buffer into aligned arrays.
class Arena {
 public:
  explicit Arena(void* memory) : next_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(size_t count) {
    T* taken = reinterpret_cast<T*>(next_);
    next_ += bytes<T>(count);
    return taken;
  }
  char* end() const { return next_; }
  template <class T>
  static constexpr size_t bytes(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  char* next_;
};

}  // namespace quire
