// What the instruction sets have in common: the shapes of a call, and the table of kernels that each of them fills in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

enum class Element : int { float32 = 0, bfloat16 = 1, int8 = 2 };

enum class Activation : int { silu = 0, gelu_tanh = 1 };

struct Bfloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

class Matrix;

// Context positions scored at once, and positions whose partial result is merged as one; both are aligned to position 0, so that
// a query's arithmetic follows from its position alone.
constexpr int TILE = 64;
constexpr int SPAN = 512;

// What lies side by side in memory for products: tokens of a block's keys, outputs of a weight.
constexpr int PANEL = 16;

// Features of a head at most.
constexpr int MAX_DIM = 256;

// One layer's attention. Strides are in elements.
// query, key, value: [tokens, heads, dim], each token's heads contiguous. out: contiguous, of the query's type.
// cos, sin: [tokens, half], for the first 2 * half features of query and key.
// softcap: scores are brought within it by its tanh; 0 for none.
// keys, values: this layer's part of block 0, [num_kv_heads, head_bytes]; a block holds 2 ** block_shift positions. See cache.hpp.
struct AttentionCall {
    const void* query;
    const void* key;
    const void* value;
    void* out;
    Element type;
    int64_t query_stride, key_stride, value_stride;
    const float* cos;
    const float* sin;
    int half;
    void* keys;
    void* values;
    Element region_type;
    int64_t block_bytes, head_bytes;
    int num_kv_heads, group, dim, block_shift;
    float scale, softcap;
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
// multiplier: of x, before the residual is added. weight_type: of x, or float32. Without a weight there is the sum alone.
struct NormCall {
    const void* x;
    const void* residual;
    const void* weight;
    void* out;
    void* sum;
    Element type, weight_type;
    int64_t x_stride;
    int heads, size;
    float eps, multiplier;
};

// gate_up [tokens, 2 * size] with a stride between tokens -> out [tokens, size].
struct GateCall {
    const void* gate_up;
    void* out;
    Element type;
    Activation activation;
    int64_t stride;
    int size;
};

// x [rows, size] with a stride between rows -> cap * tanh(x / cap), in place.
struct CapCall {
    float* x;
    int64_t stride, size;
    float cap;
};

// x [rows, inputs] and out [rows, outputs], rows apart by strides in elements; bias [outputs] or null.
struct LinearCall {
    const Matrix* matrix;
    const void* x;
    Element x_type;
    int64_t x_stride, rows;
    const float* bias;
    void* out;
    Element out_type;
    int64_t out_stride;
};

// Rows [first, end) of x in the form that the products read, `stride` bytes apart.
struct Activations {
    const char* at;
    int64_t stride, first, end;
};

// Rows of x [.., size], given by number -> minus infinity where the row of bits, 32 to a word, has 0 or no more words.
struct MaskCall {
    float* x;
    int64_t stride;
    int size;
    const int64_t* rows;
    const int32_t* bits;
    int64_t words;
};

// x [rows, size] -> each row's largest value, NaN where it holds one, and the first place it stands at.
struct ArgmaxCall {
    const float* x;
    int64_t stride, size;
    float* peaks;
    int64_t* places;
};

// x [rows, size] -> a place drawn from each row, whose largest value, finite, is in peaks. temperature, min_p, top_k (0: none), top_p and
// uniform, in [0, 1): one a row.
struct SampleCall {
    const float* x;
    int64_t stride, size;
    const float* peaks;
    const float* temperature;
    const float* min_p;
    const int64_t* top_k;
    const double* top_p;
    const double* uniform;
    int64_t* places;
};

// x [rows, size], a token for each row -> for each row the token and the `count` likeliest, of equal ones the lower first:
// logprobs, ids and ranks [rows, 1 + count].
struct ScoreCall {
    const float* x;
    int64_t stride, size;
    const int64_t* token_ids;
    int64_t count;
    float* logprobs;
    int64_t* ids;
    int64_t* ranks;
};

// logits [tokens, size] -> the `count` largest of each, of equal ones the lower first: places and weights [tokens, count]. A weight is
// the share of the softmax over all, or over those chosen.
struct RouteCall {
    const float* logits;
    int64_t stride;
    int size, count;
    bool over_chosen;
    int64_t* places;
    float* weights;
};

// Rows of x [.., size], `count` for each token -> their sum, each times its weight, added in order. rows, weights: [tokens, count].
struct CombineCall {
    const float* x;
    const int64_t* rows;
    const float* weights;
    int count, size;
    void* out;
    Element type;
};

// ids [tokens] -> out [tokens, inputs], times scale.
struct EmbeddingCall {
    const Matrix* matrix;
    const int64_t* ids;
    int64_t tokens;
    void* out;
    Element out_type;
    int64_t out_stride;
    float scale;
};

struct Kernels {
    const char* name;
    size_t (*scratch_floats)(const AttentionCall&, int queries);
    size_t (*state_floats)(const AttentionCall&);
    void (*store)(const AttentionCall&, int64_t token, int64_t slot);
    void (*attend)(const AttentionCall&, const Piece&, const Piece* following, float* scratch, float* workspace);
    void (*merge)(const AttentionCall&, const Piece&, float* scratch, const float* workspace);
    void (*rms_norm)(const NormCall&, int64_t token);
    void (*activate_and_mul)(const GateCall&, int64_t token);
    void (*softcap)(const CapCall&, int64_t row);
    void (*route)(const RouteCall&, int64_t token);
    void (*combine)(const CombineCall&, int64_t token);
    void (*mask)(const MaskCall&, int64_t row);
    void (*argmax)(const ArgmaxCall&, int64_t row);
    // Bytes of scratch for one call of sample or score.
    size_t (*look_bytes)(int64_t size);
    void (*sample)(const SampleCall&, int64_t row, char* scratch);
    void (*score)(const ScoreCall&, int64_t row, char* scratch);
    // Bytes of a row as the products read it; 0 where x is read as it is.
    size_t (*prepared_bytes)(const LinearCall&);
    void (*prepare)(const LinearCall&, int64_t row, char* to);
    // Bytes of scratch for one call of multiply.
    size_t (*product_bytes)(const LinearCall&);
    void (*multiply)(const LinearCall&, const Activations&, int64_t first_panel, int64_t end_panel, char* scratch);
    void (*embed)(const EmbeddingCall&, int64_t token);
};

namespace portable { extern const Kernels kernels; }
#ifdef OCTAVO_X86
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512_bf16 { extern const Kernels kernels; }
#endif

}  // namespace octavo
