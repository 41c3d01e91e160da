// Attention of a few queries that share a KV head, over a context that lies in blocks.
//
// A query's result is a function of its own position, its own vector and the keys and values it sees: tiles of TILE positions are
// scored and summed in order under a running maximum, from a fresh start at each SPAN, and the spans' results are merged in order.
// Neither the queries beside it, nor the blocks, nor the number of threads enter into it: what a query does not see has weight zero.
#pragma once

#include "product.hpp"

namespace octavo::OCTAVO_ISA {

// The memory of one thread. A query is one head of one token, a token's heads side by side.
// queries [queries][dim / PACK] words, and for int8 a scale and a correction each. scores [queries][TILE]. weights [queries][TILE / PACK]
// words, and for int8 a scale each. A state is a query's softmax over part of its context: [LANES] peak in lane 0, [LANES] sums by lane,
// [padded] sum of values.
struct Scratch {
    uint32_t *queries, *weights;
    float *query_scales, *corrections, *scores, *weight_scales, *span, *whole;
    Panels copies;

    static size_t state_floats(int padded) { return 2 * LANES + padded; }

    static size_t floats(int queries, int dim) { return Scratch(nullptr, queries, dim).size; }

    Scratch(float* at, int queries, int dim) {
        const size_t padded = round_up(dim);
        auto take = [&](size_t count) {
            float* out = at ? at + size : nullptr;
            size += (count + 15) / 16 * 16;
            return out;
        };
        copies.keys = reinterpret_cast<uint32_t*>(take(TILE * dim));
        copies.values = reinterpret_cast<uint32_t*>(take(TILE * padded));
        copies.key_scales = take(TILE);
        copies.value_scales = take(TILE);
        this->queries = reinterpret_cast<uint32_t*>(take(queries * dim));
        query_scales = take(queries);
        corrections = take(queries);
        scores = take(queries * TILE);
        weights = reinterpret_cast<uint32_t*>(take(queries * TILE));
        weight_scales = take(queries);
        span = take(queries * state_floats(padded));
        whole = take(queries * state_floats(padded));
    }

private:
    size_t size = 0;
};

OCTAVO_INLINE Range visible(const AttentionCall& call, int64_t position) {
    int64_t first = position - call.window + 1;
    return {first > 0 ? first : 0, position + 1};
}

static void clear(float* state, int padded) {
    store(state, broadcast(NONE));
    for (int i = 0; i < LANES + padded; i += LANES) store(state + LANES + i, Floats{});
}

static void rescale(float* state, int padded, float peak) {
    Floats factor = exponential(broadcast(state[0] - peak));
    state[0] = peak;
    for (int i = 0; i < LANES + padded; i += LANES) store(state + LANES + i, load(state + LANES + i) * factor);
}

// e^x for x <= 0, as exact as weights of T can be.
template <class T>
OCTAVO_INLINE Floats weight_of(Floats x) {
    if constexpr (sizeof(T) == sizeof(float))
        return exponential(x);
    else
        return exponential_to_4_digits(x);
}

template <class T>
OCTAVO_INLINE void store_weights(uint32_t* to, int column, Floats weight) {
#ifdef __AVX512BF16__
    if constexpr (sizeof(T) == sizeof(Bfloat16)) {
        __m256bh narrow = _mm512_cvtneps_pbh((__m512)weight);
        memcpy(reinterpret_cast<T*>(to) + column, &narrow, sizeof narrow);
        return;
    }
#endif
    store(reinterpret_cast<T*>(to) + column, weight);
}

// Turn the scores of columns [first, end), whole panels, into weights under the state's peak, which rises if it must. Columns outside of
// [from, to) are hidden. scale: what a score is worth.
template <class T>
static void weigh(float* scores, int first, int end, int from, int to, float scale, float* state, int padded, uint32_t* weights) {
    Floats top = broadcast(NONE);
    const Floats worth = broadcast(scale);
    for (int column = first; column < end; column += LANES) {
        Floats seen = load(scores + column) * worth;
        if (column < from || column + LANES > to) seen = within(seen, column, from, to, NONE);
        store(scores + column, seen);
        top = larger(seen, top);
    }
    float peak = largest(top);
    if (peak > state[0]) rescale(state, padded, peak);
    Floats base = broadcast(state[0]), sum = load(state + LANES);
    for (int column = first; column < end; column += LANES) {
        Floats weight = weight_of<T>(load(scores + column) - base);
        if constexpr (IS_INT8<T>)
            store(scores + column, weight);
        else
            store_weights<T>(weights, column, weight);
        sum = sum + weight;
    }
    store(state + LANES, sum);
}

// Weights times the scales of their values -> bytes, the largest being 255; returns what one is worth.
static float weigh_bytes(const float* scores, const float* const* scales, int first, int end, uint32_t* weights) {
    alignas(64) float scaled[TILE];
    Floats top = {};
    for (int column = first; column < end; column += LANES) {
        Floats weight = load(scores + column);
        // A hidden value's scale may be anything.
        Floats each = weight > Floats{} ? weight * load(scales[column / PANEL] + column % PANEL) : Floats{};
        store(scaled + column, each);
        top = larger(each, top);
    }
    float peak = largest(top);
    // Next to nothing counts as nothing: its inverse could be infinite.
    to_bytes(scaled + first, end - first, peak > 1e-30f ? 255.0f / peak : 0.0f, 0, reinterpret_cast<uint8_t*>(weights) + first);
    return peak * (1.0f / 255.0f);
}

// Add what `part` saw to `whole`.
static void merge_state(float* whole, const float* part, int padded) {
    float peak = part[0] > whole[0] ? part[0] : whole[0];
    if (peak > whole[0]) rescale(whole, padded, peak);
    Floats factor = exponential(broadcast(part[0] - peak));
    for (int i = 0; i < LANES + padded; i += LANES)
        store(whole + LANES + i, fused(load(part + LANES + i), factor, load(whole + LANES + i)));
}

template <class T>
static void finish(const float* state, int dim, T* out) {
    float sum = total(load(state + LANES));
    const float* values = state + 2 * LANES;
    int i = 0;
    for (; i + LANES <= dim; i += LANES) store(out + i, load(values + i) / broadcast(sum));
    for (; i < dim; i++) narrow(values[i] / sum, out[i]);
}

static void finish_piece(const AttentionCall& call, const Piece& piece, const float* states) {
    size_t state_floats = Scratch::state_floats(round_up(call.dim));
    int64_t token_size = int64_t(call.num_kv_heads) * call.group * call.dim;
    for (int i = 0; i < piece.count * call.group; i++) {
        int64_t at = (piece.token + i / call.group) * token_size + (int64_t(piece.head) * call.group + i % call.group) * call.dim;
        if (call.type == Element::float32)
            finish(states + i * state_floats, call.dim, static_cast<float*>(call.out) + at);
        else
            finish(states + i * state_floats, call.dim, static_cast<Bfloat16*>(call.out) + at);
    }
}

// What some query of the piece sees, within the piece's spans.
static Range seen_by(const AttentionCall& call, const Piece& piece) {
    Range first = visible(call, piece.position), last = visible(call, piece.position + piece.count - 1);
    return Range{first.from, last.to}.cut({int64_t(piece.first_span) * SPAN, int64_t(piece.end_span) * SPAN});
}

// following: the piece this thread takes next, whose first tile is fetched ahead; or null.
template <class T>
class PieceOfContext {
public:
    PieceOfContext(const AttentionCall& call, const Piece& piece, const Piece* following, Scratch& scratch)
        : call(call), piece(piece), following(following), scratch(scratch), reader(call, scratch.copies), padded(round_up(call.dim)),
          state_floats(Scratch::state_floats(padded)), seen(seen_by(call, piece)) {
        load_queries();
    }

    void attend_span(int span) {
        Range part = seen.cut({int64_t(span) * SPAN, int64_t(span + 1) * SPAN});
        for (int i = 0; i < piece.count * call.group; i++) clear(scratch.span + i * state_floats, padded);
        for (int64_t start = part.from / TILE * TILE; start < part.to; start += TILE) attend_tile(start);
    }

private:
    const AttentionCall& call;
    const Piece& piece;
    const Piece* following;
    Scratch& scratch;
    const TileReader<T> reader;
    const int padded;
    const int64_t state_floats;
    const Range seen;
    Tile tiles[2];

    void load_queries() {
        if (call.type == Element::float32)
            load_queries_from<float>();
        else
            load_queries_from<Bfloat16>();
    }

    template <class From>
    void load_queries_from() {
        const int words = call.dim / PACK<T>;
        alignas(64) float rotated[MAX_DIM];
        for (int query = 0; query < piece.count * call.group; query++) {
            int64_t token = piece.token + query / call.group, head = int64_t(piece.head) * call.group + query % call.group;
            const From* from = static_cast<const From*>(call.query) + token * call.query_stride + head * call.dim;
            rotate_head(from, call.cos + token * call.half, call.sin + token * call.half, call.half, call.dim, rotated);
            T* to = reinterpret_cast<T*>(scratch.queries + query * words);
            scratch.query_scales[query] = call.scale;
            scratch.corrections[query] = 0;
            if constexpr (IS_INT8<T>) {
                float scale = int8_scale(rotated, call.dim);
                to_bytes(rotated, call.dim, inverse(scale), 0, reinterpret_cast<uint8_t*>(to));
                int sum = 0;
                for (int i = 0; i < call.dim; i++) sum += to[i];
                scratch.query_scales[query] = scale * call.scale;
                scratch.corrections[query] = float(-128 * sum);  // keys are biased by 128
            } else {
                in_vectors(call.dim, [&](int i, int count) { store_some(to + i, load_some(rotated + i, count), count); });
            }
        }
    }

    // Find the tile at `start`, and where the one after it lies, which may be the next piece's first.
    void find_tiles(int64_t start) {
        Tile &tile = tiles[start / TILE % 2], &next = tiles[(start / TILE + 1) % 2];
        if (tile.start != start) reader.find(tile, piece.table, piece.head, seen.cut({start, start + TILE}), start);
        next.held = {0, 0};
        if (start + TILE < seen.to) {
            reader.find(next, piece.table, piece.head, seen.cut({start + TILE, start + 2 * TILE}), start + TILE);
        } else if (following) {
            Range coming = seen_by(call, *following);
            int64_t first = coming.from / TILE * TILE;
            reader.find(next, following->table, following->head, coming.cut({first, first + TILE}), first);
        }
    }

    void attend_tile(int64_t start) {
        find_tiles(start);
        Tile &tile = tiles[start / TILE % 2], &next = tiles[(start / TILE + 1) % 2];
        reader.load(tile, piece.table, piece.head);
        const Range held = tile.held;
        const int first_panel = tile.first_panel(), end_panel = tile.end_panel();

        // Tokens [first, end) see some of the tile.
        int first = 0, end = piece.count;
        while (held.cut(visible(call, piece.position + first)).empty()) first++;
        while (held.cut(visible(call, piece.position + end - 1)).empty()) end--;

        const int group = call.group, words = call.dim / PACK<T>, query = first * group, queries = (end - first) * group;
        float* scores = scratch.scores + int64_t(query) * TILE;
        uint32_t* weights = scratch.weights + int64_t(query) * (TILE / PACK<T>);
        const uint32_t *keys_ahead[PANELS], *values_ahead[PANELS];
        for (int panel = 0; panel < PANELS; panel++) {
            const bool comes = next.holds(panel) && call.block_shift >= PANEL_SHIFT;
            keys_ahead[panel] = comes ? next.keys[panel] : tile.keys[panel];
            values_ahead[panel] = comes ? next.values[panel] : tile.values[panel];
            if (comes && !tile.holds(panel)) reader.fetch(next, panel);
            if (comes && IS_INT8<T>) reader.fetch_scales(next, panel);
        }
        product<T>(ScoreProduct{scratch.queries + int64_t(query) * words, words, tile.keys, keys_ahead, scores}, queries, first_panel * PANEL,
                   end_panel * PANEL);
        for (int i = 0; i < queries; i++) {
            Range part = held.cut(visible(call, piece.position + first + i / group));
            weigh_query(tile, query + i, int(part.from - start), int(part.to - start));
        }
        float* sums = scratch.span + query * state_floats + 2 * LANES;
        product<T>(ValueProduct{weights, tile.values, values_ahead, first_panel, end_panel, padded, sums, state_floats, scratch.weight_scales + query}, queries, 0,
                   padded);
    }

    void weigh_query(const Tile& tile, int query, int from, int to) {
        const int first = tile.first_panel() * PANEL, end = tile.end_panel() * PANEL;
        float* scores = scratch.scores + int64_t(query) * TILE;
        float* state = scratch.span + query * state_floats;
        uint32_t* weights = scratch.weights + int64_t(query) * (TILE / PACK<T>);
        float scale = scratch.query_scales[query];
        if constexpr (IS_INT8<T>) {
            const Floats correction = broadcast(scratch.corrections[query]);
            for (int column = first; column < end; column += LANES) {
                Floats sum = to_floats((Ints)load_words(scores + column)) + correction;
                store(scores + column, sum * load(tile.key_scales[column / PANEL] + column % PANEL));
            }
        }
        if (call.softcap > 0) {
            const Floats worth = broadcast(scale / call.softcap), cap = broadcast(call.softcap);
            for (int column = first; column < end; column += LANES) store(scores + column, tangent(load(scores + column) * worth) * cap);
            scale = 1;
        }
        weigh<T>(scores, first, end, from, to, scale, state, padded, weights);
        if constexpr (IS_INT8<T>) scratch.weight_scales[query] = weigh_bytes(scores, tile.value_scales, first, end, weights);
    }
};

template <class T>
static void attend_piece(const AttentionCall& call, const Piece& piece, const Piece* following, Scratch& scratch, float* workspace) {
    const int padded = round_up(call.dim), queries = piece.count * call.group;
    const int64_t state_floats = Scratch::state_floats(padded);
    PieceOfContext<T> context(call, piece, following, scratch);
    for (int i = 0; i < queries; i++) clear(scratch.whole + i * state_floats, padded);
    for (int span = piece.first_span; span < piece.end_span; span++) {
        context.attend_span(span);
        if (piece.partial >= 0) {
            memcpy(workspace + piece.partial * state_floats, scratch.span, queries * state_floats * sizeof(float));
            return;
        }
        for (int i = 0; i < queries; i++) {
            Range part = visible(call, piece.position + i / call.group).cut({int64_t(span) * SPAN, int64_t(span + 1) * SPAN});
            if (!part.empty()) merge_state(scratch.whole + i * state_floats, scratch.span + i * state_floats, padded);
        }
    }
    finish_piece(call, piece, scratch.whole);
}

static void attend(const AttentionCall& call, const Piece& piece, const Piece* following, float* floats, float* workspace) {
    Scratch scratch(floats, piece.count * call.group, call.dim);
    switch (call.region_type) {
        case Element::float32: return attend_piece<float>(call, piece, following, scratch, workspace);
        case Element::bfloat16: return attend_piece<Bfloat16>(call, piece, following, scratch, workspace);
        case Element::int8: return attend_piece<int8_t>(call, piece, following, scratch, workspace);
    }
}

// Merge the spans of a piece whose results lie one after another in the workspace.
static void merge(const AttentionCall& call, const Piece& piece, float* floats, const float* workspace) {
    const int padded = round_up(call.dim), queries = piece.count * call.group;
    const int64_t state_floats = Scratch::state_floats(padded);
    Scratch scratch(floats, queries, call.dim);
    for (int i = 0; i < queries; i++) {
        float* whole = scratch.whole + i * state_floats;
        clear(whole, padded);
        for (int span = piece.first_span; span < piece.end_span; span++) {
            Range part = visible(call, piece.position + i / call.group).cut({int64_t(span) * SPAN, int64_t(span + 1) * SPAN});
            const float* partial = workspace + (piece.partial + int64_t(span - piece.first_span) * queries + i) * state_floats;
            if (!part.empty()) merge_state(whole, partial, padded);
        }
    }
    finish_piece(call, piece, scratch.whole);
}

}  // namespace octavo::OCTAVO_ISA
