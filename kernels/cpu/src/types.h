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

/// Two neighbouring bf16, the unit of the dot-product instruction of AVX512-BF16; anywhere a bf16 may be.
struct __attribute__((packed, aligned(2))) bf16x2 {
  uint32_t bits;
};

}  // namespace quire
