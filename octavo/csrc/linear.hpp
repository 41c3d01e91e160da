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

// Up to this many rows the panels of a weight are fetched ahead of their use, and more of them are summed at once.
constexpr int FEW_ROWS = 4, FEW_ROWS_PANELS = 2 * TILE_PANELS;

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
    if (few) multiply_dense_tiles<Step, FEW_ROWS, FEW_ROWS_PANELS>(call, x, first_panel, end_panel);
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

// A panel of codes with scales as they are stored, or widened.
template <class Scale>
struct GroupedPanel {
    const uint8_t* words;
    const Scale* scales;
    const Scale* minimums;
};

// Few rows wait for memory, and a panel is too short for the processor to see where it will read next.
template <int STEPS, int PANELS, class Scale>
OCTAVO_INLINE void fetch_ahead(const GroupedPanel<Scale>* weight, int64_t group, int64_t distance) {
    for (int p = 0; p < PANELS; p++) {
        OCTAVO_UNROLL
        for (int step = 0; step < STEPS; step++) __builtin_prefetch(weight[p].words + (group * STEPS + step) * STEP + distance);
        __builtin_prefetch(reinterpret_cast<const char*>(weight[p].scales + group * PANEL) + distance);
        __builtin_prefetch(reinterpret_cast<const char*>(weight[p].minimums + group * PANEL) + distance);
    }
}

template <bool NIBBLES, bool MINIMUMS, class Scale, int ROWS, int PANELS>
__attribute__((noinline)) static void grouped_tile(const LinearCall& call, const Activations& x, int64_t row, int64_t panel,
                                                   const GroupedPanel<Scale>* weight) {
    constexpr int WIDTH = PANELS * PANEL_VECTORS, STEPS = NIBBLES ? 4 : 8;
    const int64_t groups = call.matrix->groups();
    const char* left = x.at + (row - x.first) * x.stride;
    Floats out[ROWS][WIDTH] = {};
    for (int64_t group = 0; group < groups; group++) {
        auto rows = [&](int r) { return reinterpret_cast<const ActivationGroup*>(left + r * x.stride) + group; };
        if constexpr (ROWS <= FEW_ROWS) fetch_ahead<STEPS, PANELS>(weight, group, PANELS * call.matrix->panel_bytes());
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
                codes[w] = load_words(weight[w / PANEL_VECTORS].words + (group * STEPS + step) * STEP + w % PANEL_VECTORS * LANES * WORD);
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
            const int64_t at = group * PANEL + w % PANEL_VECTORS * LANES;
            const Floats scale = load(weight[w / PANEL_VECTORS].scales + at);
            const Floats minimum = MINIMUMS ? load(weight[w / PANEL_VECTORS].minimums + at) : Floats{};
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

static GroupedPanel<float> unpacked(const Matrix& matrix, int64_t panel, char*& scratch) {
    const int64_t groups = matrix.groups(), halves = groups * PANEL;
    const uint8_t* words = matrix.words(panel);
    if (matrix.storage() == Storage::nibbles) {
        uint8_t* to = take<uint8_t>(scratch, groups * 8 * STEP);
        for (int64_t group = 0; group < groups; group++)
            for (int at = 0; at < 4 * STEP; at += LANES * WORD) {
                const Words both = load_words(words + group * 4 * STEP + at);
                store_words(to + group * 8 * STEP + at, both & 0x0f0f0f0f);
                store_words(to + (group * 8 + 4) * STEP + at, both >> 4 & 0x0f0f0f0f);
            }
        words = to;
    }
    float *scales = take<float>(scratch, halves), *minimums = take<float>(scratch, halves);
    for (int64_t at = 0; at < halves; at += LANES) {
        store(scales + at, load(matrix.scales(panel) + at));
        if (matrix.has_minimums()) store(minimums + at, load(matrix.minimums(panel) + at));
    }
    return {words, scales, minimums};
}

template <bool MINIMUMS>
static void multiply_grouped(const LinearCall& call, const Activations& x, int64_t first_panel, int64_t end_panel, char* scratch) {
    const Matrix& matrix = *call.matrix;
    for (int64_t panel = first_panel; panel < end_panel; panel += TILE_PANELS)
        with_constant<TILE_PANELS>(end_panel - panel, [&](auto panels) {
            auto run = [&](auto nibbles, const auto* weight) {
                in_tiles<GROUPED_ROWS>(x.first, x.end, [&](int64_t row, auto rows) {
                    using Scale = std::decay_t<decltype(*weight->scales)>;
                    grouped_tile<nibbles.value, MINIMUMS, Scale, rows.value, panels.value>(call, x, row, panel, weight);
                });
            };
            if (x.end - x.first >= WORTH_UNPACKING) {
                GroupedPanel<float> weight[panels.value];
                char* free = scratch;
                for (int p = 0; p < panels.value; p++) weight[p] = unpacked(matrix, panel + p, free);
                return run(std::false_type{}, weight);
            }
            GroupedPanel<Float16> weight[panels.value];
            for (int p = 0; p < panels.value; p++)
                weight[p] = {matrix.words(panel + p), matrix.scales(panel + p), matrix.minimums(panel + p)};
            if (matrix.storage() == Storage::nibbles) run(std::true_type{}, weight);
            else run(std::false_type{}, weight);
        });
}

static void multiply(const LinearCall& call, const Activations& x, int64_t first_panel, int64_t end_panel, char* scratch) {
    switch (call.matrix->storage()) {
        case Storage::float32: return multiply_dense<Float32Step>(call, x, first_panel, end_panel);
        case Storage::bfloat16: return multiply_dense<Bfloat16Step>(call, x, first_panel, end_panel);
        default:
            if (call.matrix->has_minimums()) multiply_grouped<true>(call, x, first_panel, end_panel, scratch);
            else multiply_grouped<false>(call, x, first_panel, end_panel, scratch);
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
        const int64_t group = k / GROUP, place = k % GROUP, at = nibbles ? group * 4 * WORD + place % (GROUP / 2) : k;
        const int packed = words[at / WORD * STEP + at % WORD], code = nibbles ? packed >> place / (GROUP / 2) * 4 & 15 : packed;
        const float scale = widened(matrix.scales(panel)[group * PANEL + lane]);
        if (matrix.has_minimums()) narrow((float(code) * scale + widened(matrix.minimums(panel)[group * PANEL + lane])) * by, out[k]);
        else narrow(float(code - matrix.zero()) * scale * by, out[k]);
    }
}

static void embed(const EmbeddingCall& call, int64_t token) {
    const int64_t at = token * call.out_stride;
    if (call.out_type == Element::float32) embed_row(*call.matrix, call.ids[token], call.scale, static_cast<float*>(call.out) + at);
    else embed_row(*call.matrix, call.ids[token], call.scale, static_cast<Bfloat16*>(call.out) + at);
}

}  // namespace octavo::OCTAVO_ISA
