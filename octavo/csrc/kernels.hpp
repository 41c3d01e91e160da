// What the instruction sets have in common: the shapes of a call, and the table of kernels that each of them fills in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

enum class Element : int { float32 = 0, bfloat16 = 1 };

struct Bfloat16 {
    uint16_t bits;
};

// Context positions scored at once, and positions whose partial result is merged as one; both are aligned to position 0, so that
// a query's arithmetic follows from its position alone.
constexpr int TILE = 64;
constexpr int SPAN = 512;

// One layer's attention. Strides are in elements.
// query, key, value: [tokens, heads, dim], each token's heads contiguous. out: contiguous, of the query's type.
// keys, values: this layer's part of block 0, each [num_kv_heads, block_size, dim]; a block holds 2 ** block_shift positions.
struct AttentionCall {
    const void* query;
    const void* key;
    const void* value;
    void* out;
    Element type;
    int64_t query_stride, key_stride, value_stride;
    void* keys;
    void* values;
    Element region_type;
    int64_t block_stride;
    int num_kv_heads, group, dim, block_shift;
    float scale;
    int64_t window;
};

// Queries of one row that share one KV head: `count` tokens from `token`, the first at `position`, against spans [first_span, end_span).
// partial: the first of its states in the workspace, or -1 where the spans are merged as they come.
struct Piece {
    const int32_t* table;
    int64_t token, position, partial;
    int count, head, first_span, end_span;
};

// [tokens, heads, size] with a stride between tokens; weight [size]; out, and sum where there is a residual, are contiguous.
struct NormCall {
    const void* x;
    const void* residual;
    const void* weight;
    void* out;
    void* sum;
    Element type;
    int64_t x_stride;
    int heads, size;
    float eps;
};

// x [tokens, heads, dim] with a stride between tokens; cos and sin [tokens, half].
struct RotaryCall {
    const void* x;
    const float* cos;
    const float* sin;
    void* out;
    Element type;
    int64_t x_stride;
    int heads, dim, half;
};

// gate_up [tokens, 2 * size] with a stride between tokens -> out [tokens, size].
struct GateCall {
    const void* gate_up;
    void* out;
    Element type;
    int64_t stride;
    int size;
};

struct Kernels {
    const char* name;
    size_t (*scratch_floats)(const AttentionCall&, int queries);
    size_t (*state_floats)(const AttentionCall&);
    void (*store)(const AttentionCall&, int64_t token, int64_t slot);
    void (*attend)(const AttentionCall&, const Piece&, const Piece* following, float* scratch, float* workspace);
    void (*merge)(const AttentionCall&, const Piece&, float* scratch, const float* workspace);
    void (*rms_norm)(const NormCall&, int64_t token);
    void (*rotary)(const RotaryCall&, int64_t token);
    void (*silu_and_mul)(const GateCall&, int64_t token);
};

namespace portable { extern const Kernels kernels; }
#ifdef OCTAVO_X86
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512_bf16 { extern const Kernels kernels; }
#endif

}  // namespace octavo
