"""Operations on paged KV memory and the small fused steps around them; call them through ``kernels.ops``."""
