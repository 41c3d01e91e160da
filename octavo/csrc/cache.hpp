// How keys and values lie in KV memory, and the way in and out.
//
// A 32-bit word holds PACK neighbours: features of one token in keys, tokens of one feature in values. So one broadcast word of a query
// meets a vector of tokens' keys, and one of weights a vector of features, whatever the element. Within a block, a head's tokens form
// panels of w = min(PANEL, block_size):
//   keys    [block_size / w][dim / PACK][w] words
//   values  [block_size / p][dim][p] elements, p = min(PACK, block_size)
// int8 keys are biased by 128, as products take one operand unsigned; both are followed by a float32 scale a token, [block_size].
#pragma once

#include "lanes.hpp"

namespace octavo::OCTAVO_ISA {

template <class T>
constexpr int PACK = 4 / sizeof(T);

template <class T>
constexpr bool IS_INT8 = sizeof(T) == 1;

constexpr int PANELS = TILE / PANEL, PANEL_SHIFT = 4;

// One token's head [dim], its first 2 * half features rotated, each result rounded as memory of its type would.
template <class T>
static void rotate_head(const T* x, const float* cos, const float* sin, int half, int dim, float* out) {
    in_vectors(half, [&](int i, int count) {
        Floats first = load_some(x + i, count), second = load_some(x + half + i, count);
        Floats c = load_some(cos + i, count), s = load_some(sin + i, count);
        store_some(out + i, rounded<T>(first * c - second * s), count);
        store_some(out + half + i, rounded<T>(second * c + first * s), count);
    });
    in_vectors(dim - 2 * half, [&](int i, int count) { store_some(out + 2 * half + i, load_some(x + 2 * half + i, count), count); });
}

// The scale that brings the largest of x to 127; NaN where something is not finite.
static float int8_scale(const float* x, int size) {
    Floats top = {}, poison = {};
    in_vectors(size, [&](int i, int count) {
        Floats some = load_some(x + i, count);
        top = larger(some < Floats{} ? -some : some, top);
        poison = poison + (some - some);
    });
    return largest(top) / 127.0f + total(poison);
}

OCTAVO_INLINE float inverse(float scale) { return scale > 0 ? 1 / scale : 0.0f; }

// [size] floats, times `factor`, to the nearest whole numbers, plus `bias`.
OCTAVO_INLINE void to_bytes(const float* x, int size, float factor, int bias, uint8_t* out) {
    in_vectors(size, [&](int i, int count) {
        Bytes bytes = __builtin_convertvector(nearest(load_some(x + i, count) * broadcast(factor)) + bias, Bytes);
        if (count == LANES)
            memcpy(out + i, &bytes, LANES);
        else
            memcpy(out + i, &bytes, count);
    });
}

// Where a head's part of a block begins, in `keys` or `values` of the call.
OCTAVO_INLINE char* head_of(const AttentionCall& call, void* part, int64_t block, int head) {
    return static_cast<char*>(part) + block * call.block_bytes + head * call.head_bytes;
}

// The scales behind a head's elements.
OCTAVO_INLINE float* scales_of(const AttentionCall& call, const void* head) {
    return reinterpret_cast<float*>(const_cast<char*>(static_cast<const char*>(head)) + (int64_t(call.dim) << call.block_shift));
}

// Write the features of one token, rotated floats, as T. key: whether into keys or values.
template <class T>
static void put(const AttentionCall& call, const float* x, float scale, char* head, int offset, bool key) {
    const int dim = call.dim, block_size = 1 << call.block_shift;
    alignas(64) T row[MAX_DIM];
    if constexpr (IS_INT8<T>) {
        to_bytes(x, dim, inverse(scale), key ? 128 : 0, reinterpret_cast<uint8_t*>(row));
        scales_of(call, head)[offset] = scale;
    } else {
        in_vectors(dim, [&](int i, int count) { store_some(row + i, load_some(x + i, count), count); });
    }
    if (key) {
        const int width = block_size < PANEL ? block_size : PANEL;
        uint32_t words[MAX_DIM];
        memcpy(words, row, dim * sizeof(T));
        uint32_t* to = reinterpret_cast<uint32_t*>(head) + offset / width * width * (dim / PACK<T>) + offset % width;
        for (int i = 0; i < dim / PACK<T>; i++) to[i * width] = words[i];
    } else {
        const int pack = block_size < PACK<T> ? block_size : PACK<T>;
        T* to = reinterpret_cast<T*>(head) + offset / pack * pack * dim + offset % pack;
        for (int i = 0; i < dim; i++) to[i * pack] = row[i];
    }
}

template <class From, class To>
static void store_as(const AttentionCall& call, int64_t token, int64_t slot) {
    alignas(64) float key[MAX_DIM], value[MAX_DIM];
    const int64_t block = slot >> call.block_shift;
    const int offset = int(slot & ((int64_t(1) << call.block_shift) - 1));
    for (int head = 0; head < call.num_kv_heads; head++) {
        const From* from = static_cast<const From*>(call.key) + token * call.key_stride + int64_t(head) * call.dim;
        rotate_head(from, call.cos + token * call.half, call.sin + token * call.half, call.half, call.dim, key);
        from = static_cast<const From*>(call.value) + token * call.value_stride + int64_t(head) * call.dim;
        rotate_head<From>(from, nullptr, nullptr, 0, call.dim, value);
        float key_scale = 1, value_scale = 1;
        if constexpr (IS_INT8<To>) {
            key_scale = int8_scale(key, call.dim);
            value_scale = int8_scale(value, call.dim);
            // What weighs values takes the largest weight, which would not show a NaN: the key's score does.
            key_scale += value_scale - value_scale;
        }
        put<To>(call, key, key_scale, head_of(call, call.keys, block, head), offset, true);
        put<To>(call, value, value_scale, head_of(call, call.values, block, head), offset, false);
    }
}

template <class From>
static void store_from(const AttentionCall& call, int64_t token, int64_t slot) {
    switch (call.region_type) {
        case Element::float32: return store_as<From, float>(call, token, slot);
        case Element::bfloat16: return store_as<From, Bfloat16>(call, token, slot);
        case Element::int8: return store_as<From, int8_t>(call, token, slot);
    }
}

static void store_token(const AttentionCall& call, int64_t token, int64_t slot) {
    call.type == Element::float32 ? store_from<float>(call, token, slot) : store_from<Bfloat16>(call, token, slot);
}

// Positions [from, to).
struct Range {
    int64_t from, to;

    Range cut(Range other) const {
        return {from > other.from ? from : other.from, to < other.to ? to : other.to};
    }
    bool empty() const { return from >= to; }
};

// TILE positions of one head, in panels of whole words: keys [dim / PACK][PANEL], values [PANEL / PACK][padded].
// Panels that hold nothing of `held` have no address.
struct Tile {
    const uint32_t* keys[PANELS];
    const uint32_t* values[PANELS];
    const float* key_scales[PANELS];
    const float* value_scales[PANELS];
    int64_t start = -1;
    Range held{0, 0};

    int first_panel() const { return int(held.from - start) / PANEL; }
    int end_panel() const { return int(held.to - start + PANEL - 1) / PANEL; }
    bool holds(int panel) const { return !held.empty() && panel >= first_panel() && panel < end_panel(); }
};

// Copies of panels whose memory is laid out otherwise: of blocks smaller than a panel, or heads that fill no whole vectors.
struct Panels {
    uint32_t *keys, *values;
    float *key_scales, *value_scales;
};

template <class T>
class TileReader {
public:
    TileReader(const AttentionCall& call, const Panels& copies)
        : call(call), copies(copies), block_size(1 << call.block_shift), padded(round_up(call.dim)) {}

    // Fill in where the panels of [start, start + TILE) lie, `held` of it.
    void find(Tile& out, const int32_t* table, int head, Range held, int64_t start) const {
        out.start = start;
        out.held = held;
        for (int panel = out.first_panel(); panel < out.end_panel() && block_size >= PANEL; panel++) {
            int64_t position = start + panel * PANEL, block = table[position >> call.block_shift];
            int64_t offset = position & (block_size - 1);
            const char* keys = head_of(call, call.keys, block, head);
            const char* values = head_of(call, call.values, block, head);
            out.keys[panel] = reinterpret_cast<const uint32_t*>(keys + offset * call.dim * sizeof(T));
            out.values[panel] = reinterpret_cast<const uint32_t*>(values + offset * call.dim * sizeof(T));
            out.key_scales[panel] = scales_of(call, keys) + offset;
            out.value_scales[panel] = scales_of(call, values) + offset;
        }
    }

    // Bring panels that do not lie as products need them into the copies.
    void load(Tile& tile, const int32_t* table, int head) const {
        if (block_size < PANEL) {
            // What stands where no block is copied to must be finite.
            memset(copies.values, 0, TILE / PANEL * value_words() * sizeof(uint32_t));
            for (int64_t position = tile.start + tile.first_panel() * PANEL; position < tile.start + tile.end_panel() * PANEL; position += block_size)
                if (position + block_size > tile.held.from && position < tile.held.to)
                    copy_small_block(int(position - tile.start), table[position >> call.block_shift], head);
            for (int panel = tile.first_panel(); panel < tile.end_panel(); panel++) {
                tile.keys[panel] = copies.keys + panel * key_words();
                tile.values[panel] = copies.values + panel * value_words();
                tile.key_scales[panel] = copies.key_scales + panel * PANEL;
                tile.value_scales[panel] = copies.value_scales + panel * PANEL;
            }
        } else if (padded != call.dim) {
            for (int panel = tile.first_panel(); panel < tile.end_panel(); panel++) {
                uint32_t* to = copies.values + panel * value_words();
                for (int row = 0; row < PANEL / PACK<T>; row++) copy_words(tile.values[panel] + row * call.dim, call.dim, to + row * padded);
                tile.values[panel] = to;
            }
        }
    }

    // Fetch a panel that lies in place to the cache.
    void fetch(const Tile& tile, int panel) const {
        for (int64_t at = 0; at < key_words(); at += 16) {
            __builtin_prefetch(tile.keys[panel] + at, 0, 2);
            __builtin_prefetch(tile.values[panel] + at, 0, 2);
        }
    }

    void fetch_scales(const Tile& tile, int panel) const {
        __builtin_prefetch(tile.key_scales[panel], 0, 2);
        __builtin_prefetch(tile.value_scales[panel], 0, 2);
    }

private:
    const AttentionCall& call;
    const Panels& copies;
    const int block_size, padded;

    int64_t key_words() const { return int64_t(call.dim) / PACK<T> * PANEL; }
    int64_t value_words() const { return int64_t(PANEL) / PACK<T> * padded; }

    void copy_words(const uint32_t* from, int count, uint32_t* to) const {
        memcpy(to, from, count * sizeof(uint32_t));
        for (int i = count; i < padded; i++) to[i] = 0;
    }

    // at: the tile's position of the block's first token.
    void copy_small_block(int at, int64_t block, int head) const {
        const int dim = call.dim, offset = at % PANEL, pack = block_size < PACK<T> ? block_size : PACK<T>;
        const char* keys = head_of(call, call.keys, block, head);
        const char* values = head_of(call, call.values, block, head);
        const uint32_t* words = reinterpret_cast<const uint32_t*>(keys);
        uint32_t* key = copies.keys + at / PANEL * key_words() + offset;
        for (int i = 0; i < dim / PACK<T>; i++)
            for (int token = 0; token < block_size; token++) key[i * PANEL + token] = words[i * block_size + token];
        const T* elements = reinterpret_cast<const T*>(values);
        uint32_t* value = copies.values + at / PANEL * value_words();
        for (int token = 0; token < block_size; token += pack) {
            uint32_t* row = value + (offset + token) / PACK<T> * padded;
            if (pack == PACK<T>) {
                copy_words(reinterpret_cast<const uint32_t*>(elements + token * dim), dim, row);
            } else {
                T* to = reinterpret_cast<T*>(row) + (offset + token) % PACK<T>;
                for (int i = 0; i < dim; i++)
                    for (int j = 0; j < pack; j++) to[i * PACK<T> + j] = elements[(token * dim) + i * pack + j];
            }
        }
        if constexpr (IS_INT8<T>) {
            memcpy(copies.key_scales + at, scales_of(call, keys), block_size * sizeof(float));
            memcpy(copies.value_scales + at, scales_of(call, values), block_size * sizeof(float));
        }
    }
};

}  // namespace octavo::OCTAVO_ISA
