// The library's C interface: plain functions over raw pointers, so that Python (ctypes) and later native code call the
// same. Tensors are row-major; a stride is in elements, between rows (tokens), and everything within a row is dense.
// Functions run on the OpenMP threads of the caller. Arguments are trusted: Python checks shapes and dtypes.
#pragma once
#include <cstdint>

#define QUIRE_API __attribute__((visibility("default")))

extern "C" {

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

/// KV memory of one layer, [num_blocks, 2, kv_heads, block_size, head_dim]. block_size is a power of two. dtype: of
/// keys, values and queries. int8: rows are head_dim bytes and a float, their scale, which the bytes are multiples of.
struct QuireCache {
  void* data;
  int32_t dtype, kv_heads, block_size, head_dim, int8;
};

/// What a batch's sequences hold: rows of block_table [sequences, table_stride] and their lengths in tokens.
struct QuireSequences {
  const int32_t* block_table;
  int64_t table_stride;
  const int32_t* seq_lens;
  int32_t count;
};

/// window: a token sees that many tokens, itself included (0: all). softcap: 0, or the bound of scores.
struct QuireScores {
  float scale, softcap;
  int32_t window;
};

/// Lets thread i of a team of `threads` run on CPUs cpus[bounds[i]] to cpus[bounds[i + 1] - 1] alone, in this and every
/// later call of the same caller. Returns how many threads the system did not let.
QUIRE_API int32_t quire_pin_threads(int32_t threads, const int32_t* bounds, const int32_t* cpus);

/// Writes keys and values k, v [tokens, kv_heads, head_dim] to their slots; slot -1 is skipped.
QUIRE_API void quire_store_kv(const QuireCache* cache, const void* k, int64_t k_stride, const void* v, int64_t v_stride,
                    const int64_t* slots, int64_t tokens);

/// Copies whole blocks of `bytes` between two memories (or within one): block from[i] of source over to[i] of target.
QUIRE_API void quire_copy_blocks(const void* source, void* target, int64_t bytes, const int64_t* from, const int64_t* to,
                       int64_t pairs);

/// Attention of one new token a sequence. q, out [sequences, heads, head_dim].
QUIRE_API void quire_paged_decode(const QuireCache* cache, const QuireSequences* sequences, const QuireScores* scores,
                        const void* q, int64_t q_stride, void* out, int32_t heads);

/// Attention of rows cu_seqlens[i] .. cu_seqlens[i + 1] of q, the last tokens of sequence i. q, out [T, heads, head_dim].
QUIRE_API void quire_paged_prefill(const QuireCache* cache, const QuireSequences* sequences, const QuireScores* scores,
                         const int32_t* cu_seqlens, const void* q, int64_t q_stride, void* out, int32_t heads);

/// Rotates x [tokens, heads, head_dim] in place; cos_sin [positions, head_dim], cosines first.
QUIRE_API void quire_rope(int32_t dtype, void* x, int64_t stride, const float* cos_sin, const int64_t* positions, int64_t tokens,
                int32_t heads, int32_t head_dim);

/// One pass over qkv [tokens, heads + 2 kv_heads, head_dim]: norms q and k (where weights are given), rotates q in
/// place and k on its way into the cache, and stores v.
QUIRE_API void quire_rope_store(const QuireCache* cache, void* qkv, int64_t stride, const float* cos_sin,
                      const int64_t* positions, const int64_t* slots, int64_t tokens, int32_t heads,
                      const void* q_norm, const void* k_norm, float eps);

/// out = x / rms(x) * weight; with a residual: residual += x first, and the norm is that of the residual.
QUIRE_API void quire_rms_norm(int32_t dtype, const void* x, int64_t x_stride, void* residual, const void* weight, float eps,
                    void* out, int64_t rows, int32_t columns);

/// out [rows, columns] = silu(gate) * up of gate_up [rows, 2 columns].
QUIRE_API void quire_silu_mul(int32_t dtype, const void* gate_up, int64_t stride, void* out, int64_t rows, int32_t columns);

/// Bytes of `weight` [outputs, inputs] when packed.
QUIRE_API int64_t quire_linear_bytes(int32_t dtype, int64_t outputs, int64_t inputs);
QUIRE_API void quire_linear_pack(int32_t dtype, const void* weight, void* packed, int64_t outputs, int64_t inputs);

/// How a weight is quantised: codes of `bits` 4 or 8 stand for scale * (code - 128), or with minimums for scale * code +
/// minimum, with a scale (and a minimum) for each `group` of inputs of an output. 4 bits have minimums. Inputs, which are
/// a multiple of the group, and the group, of 32, are rounded to integers of `digits` 1 or 2 bytes with a scale for each
/// group of a row. bits is 0 for a weight that is not quantised.
struct QuireQuantization {
  int32_t bits, group, digits, minimums;
};

/// Bytes of a quantised weight [outputs, inputs] when packed; and packs it. codes [outputs, inputs]; scales and minimums
/// [outputs, inputs / group] as fp16, minimums null where there are none.
QUIRE_API int64_t quire_quantized_bytes(const QuireQuantization* how, int64_t outputs, int64_t inputs);
QUIRE_API void quire_quantized_pack(const QuireQuantization* how, const uint8_t* codes, const void* scales,
                          const void* minimums, void* packed, int64_t outputs, int64_t inputs);

/// A packed weight [outputs, inputs] and its bias (which may be null). inputs is even.
struct QuireLinear {
  const void *packed, *bias;
  int64_t outputs, inputs;
  QuireQuantization quantization;
};

/// out [rows, outputs] = x [rows, inputs] weight^T + bias.
QUIRE_API void quire_linear(int32_t dtype, const QuireLinear* layer, const void* x, int64_t x_stride, void* out,
                  int64_t out_stride, int64_t rows);

/// One layer of a decoder. Norms of q and k may be null. window as in QuireScores.
struct QuireLayer {
  const void *input_norm, *post_norm, *q_norm, *k_norm;
  QuireLinear qkv, out, gate_up, down;
  int32_t window;
};

/// A whole decoder; all its tensors have one dtype. embedding [vocabulary, hidden]; cos_sin as in quire_rope.
struct QuireDecoder {
  const QuireLayer* layers;
  const void *embedding, *norm;
  const float* cos_sin;
  QuireLinear head;
  int64_t hidden;
  int32_t num_layers, dtype, heads, kv_heads, head_dim;
  float eps, scale;
};

/// The tokens of one step: one for each sequence of decodes, then those of chunks. samples: the rows whose logits are
/// wanted. likeliest: where the ids of their largest logits go, or null.
struct QuireBatch {
  const int64_t *tokens, *positions, *slots;
  int64_t count;
  QuireSequences decodes, chunks;
  const int32_t* chunk_cu_seqlens;
  const int64_t* samples;
  int64_t sample_count;
  int64_t* likeliest;
};

/// Seconds of a step by part: linear layers, attention, all else of the layers, and the logits.
struct QuireTimes {
  double linear, attention, other, head;
};

/// A whole forward pass: stores keys and values in kv (one pointer a layer, memory of blocks of block_size; int8 as in
/// QuireCache) and writes logits [sample_count, vocabulary].
QUIRE_API void quire_step(const QuireDecoder* decoder, void* const* kv, int32_t block_size, int32_t int8,
                const QuireBatch* batch, void* logits, QuireTimes* times);

/// How each row is sampled, as in kernels.ops.
struct QuireSampling {
  const float* temperature;
  const int64_t* top_k;
  const float *top_p, *min_p;
  const int64_t *seeds, *positions;
};

/// Lists of token ids, row r's being ids[bounds[r]] .. ids[bounds[r + 1] - 1]; values beside them where they have any.
struct QuireIds {
  const int64_t *bounds, *ids;
  const float* values;
};

/// What is done to logits first, in this order: all but `allowed` are banned (rows with none allow all), `banned` are,
/// `bias` is added, and the tokens `seen`, whose values are how often, get the row's penalties [rows, 3]: repetition,
/// frequency, presence.
struct QuireEdits {
  QuireIds allowed, banned, bias, seen;
  const float* penalties;
};

/// The token drawn for each row of logits [rows, columns]. edits: null where there are none.
QUIRE_API void quire_sample(int32_t dtype, const void* logits, int64_t stride, const QuireSampling* how,
                  const QuireEdits* edits, int64_t* out, int64_t rows, int64_t columns);

/// Index of each row's largest logit, the first of several.
QUIRE_API void quire_argmax(int32_t dtype, const void* logits, int64_t stride, int64_t* out, int64_t rows, int64_t columns);
}
