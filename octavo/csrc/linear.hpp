// Products of rows of activations with packed weights. Each output of a row is one chain of additions over the inputs in order, so
// that its value is the same whichever rows and panels are computed beside it.
#pragma once

#include <type_traits>

#include "lanes.hpp"
#include "matrix.hpp"

namespace octavo::OCTAVO_ISA {

// The largest tiles that keep their sums in registers.
#if defined(__AVX512F__)
constexpr int DENSE_ROWS = 12, GROUPED_ROWS = 6, TILE_PANELS = 2;
#elif defined(__AVX2__)
constexpr int DENSE_ROWS = 4, GROUPED_ROWS = 2, TILE_PANELS = 1;
#else
constexpr int DENSE_ROWS = 2, GROUPED_ROWS = 2, TILE_PANELS = 1;
#endif

constexpr int PANEL_VECTORS = PANEL / LANES, WORD = 4, STEP = PANEL * WORD;

// From this many rows on it pays to unpack a grouped weight before it is used.
constexpr int WORTH_UNPACKING = 3 * GROUPED_ROWS;

// Up to this many rows wait for memory, which is quickest where the panels are read one after another.
constexpr int FEW_ROWS = 4;

#define OCTAVO_UNROLL _Pragma("GCC unroll 32")

// Calls apply with `count`, at most MOST, as a constant.
template <int MOST, class Apply>
OCTAVO_INLINE void with_constant(int64_t count, Apply apply) {
    if constexpr (MOST > 1) {
        if (count < MOST) return with_constant<MOST - 1>(count, apply);
    }
    apply(std::integral_constant<int, MOST>{});
}

// Calls apply(row, count) for rows in tiles of at most MOST, about equally large.
template <int MOST, class Apply>
OCTAVO_INLINE void in_tiles(int64_t first, int64_t end, Apply apply) {
    const int64_t rows = end - first, tiles = (rows + MOST - 1) / MOST;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t from = first + rows * tile / tiles, to = first + rows * (tile + 1) / tiles;
        with_constant<MOST>(to - from, [&](auto count) { apply(from, count); });
    }
}

template <int ROWS, int WIDTH>
OCTAVO_INLINE void put(const LinearCall& call, int64_t row, int64_t panel, const Floats (&sum)[ROWS][WIDTH]) {
    OCTAVO_UNROLL
    for (int w = 0; w < WIDTH; w++) {
        const int64_t column = panel * PANEL + w * LANES, left = call.matrix->outputs() - column;
        if (left <= 0) return;
        const int count = left < LANES ? int(left) : LANES;
        const Floats bias = call.bias ? load_some(call.bias + column, count) : Floats{};
        OCTAVO_UNROLL
        for (int r = 0; r < ROWS; r++) {
            const Floats y = call.bias ? sum[r][w] + bias : sum[r][w];
            const int64_t at = (row + r) * call.out_stride + column;
            if (call.out_type == Element::float32) store_some(static_cast<float*>(call.out) + at, y, count);
            else store_some(static_cast<Bfloat16*>(call.out) + at, y, count);
        }
    }
}

// One step of a dense product: a word of the row against the words of a panel.
struct Float32Step {
    OCTAVO_INLINE Floats add(Words weight, Words x, Floats sum) { return fused((Floats)weight, (Floats)x, sum); }
};

struct Bfloat16Step {
    OCTAVO_INLINE Floats add(Words weight, Words x, Floats sum) { return dot(weight, x, sum); }
};

template <class Step, int ROWS, int PANELS>
__attribute__((noinline)) static void dense_tile(const LinearCall& call, const Activations& x, int64_t row, int64_t panel) {
    constexpr int WIDTH = PANELS * PANEL_VECTORS;
    const int64_t steps = call.matrix->steps(), panel_bytes = call.matrix->panel_bytes();
    const uint8_t* words = call.matrix->words(panel);
    const char* left = x.at + (row - x.first) * x.stride;
    Floats sum[ROWS][WIDTH] = {};
    for (int64_t step = 0; step < steps; step++) {
        Words weight[WIDTH];
        OCTAVO_UNROLL
        for (int w = 0; w < WIDTH; w++)
            weight[w] = load_words(words + w / PANEL_VECTORS * panel_bytes + step * STEP + w % PANEL_VECTORS * LANES * WORD);
        OCTAVO_UNROLL
        for (int r = 0; r < ROWS; r++) {
            const Words word = broadcast_word(left + r * x.stride + step * WORD);
            OCTAVO_UNROLL
            for (int w = 0; w < WIDTH; w++) sum[r][w] = Step::add(weight[w], word, sum[r][w]);
        }
    }
    put(call, row, panel, sum);
}

template <class Step, int ROWS, int PANELS>
static void multiply_dense_tiles(const LinearCall& call, const Activations& x, int64_t first_panel, int64_t end_panel) {
    for (int64_t panel = first_panel; panel < end_panel; panel += PANELS)
        with_constant<PANELS>(end_panel - panel, [&](auto panels) {
            in_tiles<ROWS>(x.first, x.end, [&](int64_t row, auto rows) {
                dense_tile<Step, rows.value, panels.value>(call, x, row, panel);
            });
        });
}

template <class Step>
static void multiply_dense(const LinearCall& call, const Activations& x, int64_t first_panel, int64_t end_panel) {
    const bool few = x.end - x.first <= FEW_ROWS;
    if (few) multiply_dense_tiles<Step, FEW_ROWS, 1>(call, x, first_panel, end_panel);
    else multiply_dense_tiles<Step, DENSE_ROWS, TILE_PANELS>(call, x, first_panel, end_panel);
}

// A group of a row, rounded to codes * scale, and its part in what a weight's zero or minimum adds.
struct ActivationGroup {
    int8_t codes[GROUP];
    float scale;
    union {
        float scaled_sum;  // scale * sum of codes, where the weight has minimums
        int32_t offset;    // -zero * sum of codes, where it has not
    };
};

// A panel as a matrix holds it.
template <bool NIBBLED, bool SHIFTED>
struct PackedPanel {
    static constexpr bool NIBBLES = NIBBLED, MINIMUMS = SHIFTED;
    const uint8_t* at;

    const uint8_t* codes(int64_t group) const { return at + group * group_bytes(NIBBLES, MINIMUMS); }
    const Float16* scales(int64_t group) const { return reinterpret_cast<const Float16*>(codes(group) + code_bytes(NIBBLES)); }
    const Float16* minimums(int64_t group) const { return scales(group) + PANEL; }
};

// A panel with a byte for each code and its scales widened.
struct UnpackedPanel {
    static constexpr bool NIBBLES = false;
    const uint8_t* all_codes;
    const float *all_scales, *all_minimums;

    const uint8_t* codes(int64_t group) const { return all_codes + group * code_bytes(false); }
    const float* scales(int64_t group) const { return all_scales + group * PANEL; }
    const float* minimums(int64_t group) const { return all_minimums + group * PANEL; }
};

template <bool MINIMUMS, class Panel, int ROWS, int PANELS>
__attribute__((noinline)) static void grouped_tile(const LinearCall& call, const Activations& x, int64_t row, int64_t panel,
                                                   const Panel* weight) {
    constexpr bool NIBBLES = Panel::NIBBLES;
    constexpr int WIDTH = PANELS * PANEL_VECTORS, STEPS = NIBBLES ? 4 : 8;
    const int64_t groups = call.matrix->groups();
    const char* left = x.at + (row - x.first) * x.stride;
    Floats out[ROWS][WIDTH] = {};
    for (int64_t group = 0; group < groups; group++) {
        auto rows = [&](int r) { return reinterpret_cast<const ActivationGroup*>(left + r * x.stride) + group; };
        Ints sum[ROWS][WIDTH];
        OCTAVO_UNROLL
        for (int r = 0; r < ROWS; r++)
            OCTAVO_UNROLL
            for (int w = 0; w < WIDTH; w++) sum[r][w] = MINIMUMS ? Ints{} : broadcast(rows(r)->offset);
        OCTAVO_UNROLL
        for (int step = 0; step < STEPS; step++) {
            Words codes[WIDTH], upper[WIDTH];
            OCTAVO_UNROLL
            for (int w = 0; w < WIDTH; w++) {
                codes[w] = load_words(weight[w / PANEL_VECTORS].codes(group) + step * STEP + w % PANEL_VECTORS * LANES * WORD);
                if constexpr (NIBBLES) {
                    upper[w] = codes[w] >> 4 & 0x0f0f0f0f;
                    codes[w] &= 0x0f0f0f0f;
                }
            }
            OCTAVO_UNROLL
            for (int r = 0; r < ROWS; r++) {
                const Words word = broadcast_word(rows(r)->codes + step * WORD);
                OCTAVO_UNROLL
                for (int w = 0; w < WIDTH; w++) sum[r][w] = dot_bytes(codes[w], word, sum[r][w]);
                if constexpr (NIBBLES) {
                    const Words other = broadcast_word(rows(r)->codes + GROUP / 2 + step * WORD);
                    OCTAVO_UNROLL
                    for (int w = 0; w < WIDTH; w++) sum[r][w] = dot_bytes(upper[w], other, sum[r][w]);
                }
            }
        }
        OCTAVO_UNROLL
        for (int w = 0; w < WIDTH; w++) {
            const int at = w % PANEL_VECTORS * LANES;
            const Floats scale = load(weight[w / PANEL_VECTORS].scales(group) + at);
            const Floats minimum = MINIMUMS ? load(weight[w / PANEL_VECTORS].minimums(group) + at) : Floats{};
            OCTAVO_UNROLL
            for (int r = 0; r < ROWS; r++) {
                if constexpr (MINIMUMS) out[r][w] = fused(minimum, broadcast(rows(r)->scaled_sum), out[r][w]);
                out[r][w] = fused(to_floats(sum[r][w]), scale * broadcast(rows(r)->scale), out[r][w]);
            }
        }
    }
    put(call, row, panel, out);
}

// Takes scratch in steps of whole cache lines.
template <class T>
OCTAVO_INLINE T* take(char*& scratch, int64_t count) {
    T* taken = reinterpret_cast<T*>(scratch);
    scratch += (count * sizeof(T) + 63) / 64 * 64;
    return taken;
}

template <class Packed>
static UnpackedPanel unpacked(const Packed& packed, int64_t groups, char*& scratch) {
    uint8_t* codes = take<uint8_t>(scratch, groups * code_bytes(false));
    float *scales = take<float>(scratch, groups * PANEL), *mins = take<float>(scratch, groups * PANEL);
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t* from = packed.codes(group);
        uint8_t* to = codes + group * code_bytes(false);
        for (int at = 0; at < code_bytes(Packed::NIBBLES); at += LANES * WORD) {
            const Words words = load_words(from + at);
            store_words(to + at, Packed::NIBBLES ? words & 0x0f0f0f0f : words);
            if (Packed::NIBBLES) store_words(to + 4 * STEP + at, words >> 4 & 0x0f0f0f0f);
        }
        for (int at = 0; at < PANEL; at += LANES) {
            store(scales + group * PANEL + at, load(packed.scales(group) + at));
            if (Packed::MINIMUMS) store(mins + group * PANEL + at, load(packed.minimums(group) + at));
        }
    }
    return {codes, scales, mins};
}

// What is read next, fetched bit by bit while these panels are multiplied.
struct Ahead {
    const uint8_t* at;
    int64_t bytes;
};

template <bool MINIMUMS, class Panel, int ROWS, int PANELS>
static void multiply_panels(const LinearCall& call, const Activations& x, int64_t panel, const Panel* weight, Ahead ahead = {}) {
    const int64_t each = ahead.bytes / (x.end - x.first);
    in_tiles<ROWS>(x.first, x.end, [&](int64_t row, auto rows) {
        const uint8_t* from = ahead.at + (row - x.first) * each;
        for (int64_t at = 0; at < rows.value * each; at += 64) __builtin_prefetch(from + at, 0, 2);
        grouped_tile<MINIMUMS, Panel, rows.value, PANELS>(call, x, row, panel, weight);
    });
}

template <bool NIBBLES, bool MINIMUMS>
static void multiply_grouped(const LinearCall& call, const Activations& x, int64_t first_panel, int64_t end_panel, char* scratch) {
    using Packed = PackedPanel<NIBBLES, MINIMUMS>;
    const Matrix& matrix = *call.matrix;
    const int64_t rows = x.end - x.first;
    if (rows <= FEW_ROWS) {
        for (int64_t panel = first_panel; panel < end_panel; panel++) {
            const Packed weight{matrix.words(panel)};
            multiply_panels<MINIMUMS, Packed, FEW_ROWS, 1>(call, x, panel, &weight);
        }
        return;
    }
    for (int64_t panel = first_panel; panel < end_panel; panel += TILE_PANELS)
        with_constant<TILE_PANELS>(end_panel - panel, [&](auto panels) {
            Packed weight[panels.value];
            for (int p = 0; p < panels.value; p++) weight[p] = {matrix.words(panel + p)};
            if (rows < WORTH_UNPACKING) return multiply_panels<MINIMUMS, Packed, GROUPED_ROWS, panels.value>(call, x, panel, weight);
            UnpackedPanel wide[panels.value];
            char* free = scratch;
            for (int p = 0; p < panels.value; p++) wide[p] = unpacked(weight[p], matrix.groups(), free);
            const int64_t next = panel + panels.value, left = end_panel - next, bytes = matrix.panel_bytes();
            multiply_panels<MINIMUMS, UnpackedPanel, GROUPED_ROWS, panels.value>(
                call, x, panel, wide, {matrix.words(next), (left < TILE_PANELS ? left : TILE_PANELS) * bytes});
        });
}

template <bool NIBBLES>
static void multiply_grouped(const LinearCall& call, const Activations& x, int64_t first_panel, int64_t end_panel, char* scratch) {
    if (call.matrix->has_minimums()) multiply_grouped<NIBBLES, true>(call, x, first_panel, end_panel, scratch);
    else multiply_grouped<NIBBLES, false>(call, x, first_panel, end_panel, scratch);
}

static void multiply(const LinearCall& call, const Activations& x, int64_t first_panel, int64_t end_panel, char* scratch) {
    switch (call.matrix->storage()) {
        case Storage::float32: return multiply_dense<Float32Step>(call, x, first_panel, end_panel);
        case Storage::bfloat16: return multiply_dense<Bfloat16Step>(call, x, first_panel, end_panel);
        case Storage::bytes: return multiply_grouped<false>(call, x, first_panel, end_panel, scratch);
        case Storage::nibbles: return multiply_grouped<true>(call, x, first_panel, end_panel, scratch);
    }
}

static size_t product_bytes(const LinearCall& call) {
    const int64_t groups = call.matrix->groups();
    return call.matrix->is_grouped() ? TILE_PANELS * groups * (8 * STEP + 2 * PANEL * sizeof(float)) : 0;
}

static size_t prepared_bytes(const LinearCall& call) {
    const Matrix& matrix = *call.matrix;
    if (matrix.is_grouped()) return matrix.groups() * sizeof(ActivationGroup);
    const bool is_float32 = matrix.storage() == Storage::float32;
    if (is_float32 == (call.x_type == Element::float32) && (is_float32 || matrix.inputs() % 2 == 0)) return 0;
    return matrix.steps() * WORD;
}

template <class T>
static ActivationGroup quantized(const T* x, const Matrix& matrix) {
    constexpr int VECTORS = GROUP / LANES;
    Floats value[VECTORS];
    Ints peaks = {};
    for (int i = 0; i < VECTORS; i++) {
        value[i] = load(x + i * LANES);
        // Magnitudes are in the order of their bits, with infinity and NaN above all others.
        const Ints magnitude = (Ints)value[i] & 0x7fffffff;
        peaks = magnitude > peaks ? magnitude : peaks;
    }
    const int32_t peak_bits = largest(peaks);
    float peak;
    memcpy(&peak, &peak_bits, sizeof peak);
    const bool is_finite = peak_bits < 0x7f800000;
    const float scale = peak / 127.0f;
    // The inverse of a subnormal scale could be infinite: next to nothing counts as nothing.
    const bool is_zero = scale < std::numeric_limits<float>::min();
    const Floats inverse = broadcast(is_finite && !is_zero ? 1.0f / scale : 0.0f);
    ActivationGroup out;
    Ints sums = {};
    for (int i = 0; i < VECTORS; i++) {
        const Ints code = is_finite ? nearest(value[i] * inverse) : Ints{};
        const Bytes narrow = __builtin_convertvector(code, Bytes);
        memcpy(out.codes + i * LANES, &narrow, sizeof narrow);
        sums += code;
    }
    const int32_t sum = total(sums);
    out.scale = is_zero ? 0.0f : is_finite ? scale : std::numeric_limits<float>::quiet_NaN();
    if (matrix.has_minimums()) out.scaled_sum = out.scale * float(sum);
    else out.offset = -matrix.zero() * sum;
    return out;
}

template <class T>
static void quantize(const T* x, const Matrix& matrix, char* to) {
    auto out = reinterpret_cast<ActivationGroup*>(to);
    const int64_t size = matrix.inputs(), whole = size / GROUP;
    for (int64_t group = 0; group < whole; group++) out[group] = quantized(x + group * GROUP, matrix);
    if (whole == matrix.groups()) return;
    T rest[GROUP] = {};
    memcpy(rest, x + whole * GROUP, (size - whole * GROUP) * sizeof(T));
    out[whole] = quantized(rest, matrix);
}

// `to` may have room for one element more, which is then zero.
template <class From, class To>
static void convert(const From* x, int64_t size, int64_t room, To* to) {
    if (room > size) memset(static_cast<void*>(to + size), 0, sizeof(To));
    in_vectors(int(size), [&](int i, int count) { store_some(to + i, load_some(x + i, count), count); });
}

template <class T>
static void prepare_row(const T* x, const Matrix& matrix, char* to) {
    const int64_t size = matrix.inputs();
    switch (matrix.storage()) {
        case Storage::float32: return convert(x, size, size, reinterpret_cast<float*>(to));
        case Storage::bfloat16: return convert(x, size, 2 * matrix.steps(), reinterpret_cast<Bfloat16*>(to));
        default: return quantize(x, matrix, to);
    }
}

static void prepare(const LinearCall& call, int64_t row, char* to) {
    if (call.x_type == Element::float32) prepare_row(static_cast<const float*>(call.x) + row * call.x_stride, *call.matrix, to);
    else prepare_row(static_cast<const Bfloat16*>(call.x) + row * call.x_stride, *call.matrix, to);
}

static float widened(Float16 x) {
    Float16 held[LANES] = {x};
    return load(held)[0];
}

template <class T>
static void embed_row(const Matrix& matrix, int64_t id, float by, T* out) {
    const int64_t panel = id / PANEL, lane = id % PANEL, size = matrix.inputs();
    const uint8_t* words = matrix.words(panel) + lane * WORD;
    if (!matrix.is_grouped()) {
        const int64_t element = matrix.storage() == Storage::float32 ? 4 : 2;
        for (int64_t k = 0; k < size; k++) {
            const uint8_t* from = words + k * element / WORD * STEP + k * element % WORD;
            if (element == 4) {
                float value;
                memcpy(&value, from, sizeof value);
                narrow(value * by, out[k]);
            } else {
                Bfloat16 value;
                memcpy(&value, from, sizeof value);
                narrow(widen(value) * by, out[k]);
            }
        }
        return;
    }
    const bool nibbles = matrix.storage() == Storage::nibbles;
    for (int64_t k = 0; k < size; k++) {
        const uint8_t* group = matrix.words(panel) + k / GROUP * matrix.group_bytes();
        const int64_t place = k % GROUP, at = nibbles ? place % (GROUP / 2) : place;
        const int packed = group[at / WORD * STEP + lane * WORD + at % WORD];
        const int code = nibbles ? packed >> place / (GROUP / 2) * 4 & 15 : packed;
        const Float16* scale = reinterpret_cast<const Float16*>(group + code_bytes(nibbles)) + lane;
        if (matrix.has_minimums()) narrow((float(code) * widened(*scale) + widened(scale[PANEL])) * by, out[k]);
        else narrow(float(code - matrix.zero()) * widened(*scale) * by, out[k]);
    }
}

static void embed(const EmbeddingCall& call, int64_t token) {
    const int64_t at = token * call.out_stride;
    if (call.out_type == Element::float32) embed_row(*call.matrix, call.ids[token], call.scale, static_cast<float*>(call.out) + at);
    else embed_row(*call.matrix, call.ids[token], call.scale, static_cast<Bfloat16*>(call.out) + at);
}

}  // namespace octavo::OCTAVO_ISA
