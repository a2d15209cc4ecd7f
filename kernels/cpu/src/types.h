// Element types of tensors, as storage. Arithmetic is float; vec.h converts.
#pragma once
#include <cstdint>

namespace quire {

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

/// An element of a row of KV memory that is rounded to 8 bits: its value is that many times the row's scale.
struct i8 {
  int8_t value;
};

/// Two neighbouring bf16, the unit of the dot-product instruction of AVX512-BF16; anywhere a bf16 may be.
struct __attribute__((packed, aligned(2))) bf16x2 {
  uint32_t bits;
};

}  // namespace quire
