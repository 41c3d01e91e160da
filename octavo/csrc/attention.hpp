// Attention of a few queries that share a KV head, over a context that lies in blocks.
//
// A query's result is a function of its own position, its own vector and the keys and values it sees: tiles of TILE positions are
// scored and summed in order under a running maximum, from a fresh start at each SPAN, and the spans' results are merged in order.
// Neither the queries beside it, nor the blocks, nor the number of threads enter into it. What a query does not see is never
// multiplied: hidden scores are replaced, and hidden values left out of the sum.
#pragma once

#include "product.hpp"
#include "tiles.hpp"

namespace octavo::OCTAVO_ISA {

// The floats of one thread. A query is one head of one token, a token's heads side by side.
// queries [queries, dim], scaled. keys [dim, TILE]. values [TILE, padded]. weights [queries, TILE].
// A state is a query's softmax over part of its context: [LANES] peak in lane 0, [LANES] sums by lane, [padded] sum of values.
struct Scratch {
    float *queries, *keys, *values, *weights, *span, *whole;

    static size_t state_floats(int padded) { return 2 * LANES + padded; }

    static size_t floats(int queries, int dim) {
        size_t padded = round_up(dim);
        return size_t(queries) * (dim + LANES + TILE + 2 * state_floats(padded)) + TILE * (dim + LANES + padded);
    }

    Scratch(float* at, int queries, int dim) {
        int padded = round_up(dim);
        auto take = [&at](size_t count) {
            float* out = at;
            at += (count + LANES - 1) / LANES * LANES;
            return out;
        };
        keys = take(size_t(dim) * TILE);
        values = take(size_t(padded) * TILE);
        this->queries = take(size_t(queries) * dim);
        weights = take(size_t(queries) * TILE);
        span = take(queries * state_floats(padded));
        whole = take(queries * state_floats(padded));
    }
};

// Positions [from, to).
struct Range {
    int64_t from, to;

    Range cut(Range other) const {
        return {from > other.from ? from : other.from, to < other.to ? to : other.to};
    }
    bool empty() const { return from >= to; }
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

// Turn the scores of columns [from, to) into weights under the state's peak, which rises if it must.
static void weigh(float* scores, int from, int to, float* state, int padded) {
    int first = from / LANES * LANES;
    Floats top = broadcast(NONE);
    for (int column = first; column < to; column += LANES) {
        Floats seen = within(load(scores + column), column, from, to, NONE);
        store(scores + column, seen);
        top = larger(seen, top);
    }
    float peak = largest(top);
    if (peak > state[0]) rescale(state, padded, peak);
    Floats base = broadcast(state[0]), sum = load(state + LANES);
    for (int column = first; column < to; column += LANES) {
        Floats weight = exponential(load(scores + column) - base);
        store(scores + column, weight);
        sum = sum + weight;
    }
    store(state + LANES, sum);
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
        : call(call), piece(piece), following(following), scratch(scratch), padded(round_up(call.dim)),
          state_floats(Scratch::state_floats(padded)), seen(seen_by(call, piece)) {}

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
    const int padded;
    const int64_t state_floats;
    const Range seen;

    // keys[j], values[j]: the rows of position start + j. Those outside of `held` repeat the nearest inside: no query sees them.
    struct Rows {
        const T* keys[TILE];
        const T* values[TILE];
        int64_t start = -1;
        Range held{0, 0};
    };
    Rows rows[2];

    void find(Rows& out, const Piece& piece, Range seen, int64_t start) const {
        out.start = start;
        out.held = seen.cut({start, start + TILE});
        const int64_t mask = (int64_t(1) << call.block_shift) - 1;
        const ptrdiff_t to_values = static_cast<const T*>(call.values) - static_cast<const T*>(call.keys);
        const T* head = static_cast<const T*>(call.keys) + (int64_t(piece.head) << call.block_shift) * call.dim;
        int first = int(out.held.from - start), end = int(out.held.to - start);
        for (int j = 0; j < TILE; j++) {
            int64_t position = start + (j < first ? first : j < end ? j : end - 1);
            out.keys[j] = head + piece.table[position >> call.block_shift] * call.block_stride + (position & mask) * call.dim;
            out.values[j] = out.keys[j] + to_values;
        }
    }

    // Widen a tile, and fetch the next one to the cache meanwhile: a little at a time, since a burst of fetches would stall.
    void load_tile(const Rows& tile, const Rows& next) {
        int first = int(tile.held.from - tile.start), end = int(tile.held.to - tile.start);
        const bool fetches = !next.held.empty();
        for (int j = first / LANES * LANES; j < end; j += LANES) {
            transpose_rows(tile.keys + j, call.dim, scratch.keys + j);
            for (int i = j; fetches && i < j + LANES; i++) fetch(next.keys[i]);
        }
        for (int j = first; j < end; j++) {
            widen_row(tile.values[j], call.dim, scratch.values + j * int64_t(padded));
            if (fetches) fetch(next.values[j]);
        }
    }

    void fetch(const T* row) const {
        constexpr int CACHE_LINE = 64 / sizeof(T);
        for (int at = 0; at < call.dim; at += CACHE_LINE) __builtin_prefetch(row + at, 0, 2);
    }

    void attend_tile(int64_t start) {
        Rows &tile = rows[start / TILE % 2], &next = rows[(start / TILE + 1) % 2];
        if (tile.start != start) find(tile, piece, seen, start);
        next.held = {0, 0};
        if (start + TILE < seen.to) {
            find(next, piece, seen, start + TILE);
        } else if (following) {
            Range coming = seen_by(call, *following);
            find(next, *following, coming, coming.from / TILE * TILE);
        }
        load_tile(tile, next);
        const Range held = tile.held;

        // Tokens [first, end) see some of the tile, of which [whole_first, whole_end) see all of what is held.
        int first = piece.count, end = 0, whole_first = piece.count, whole_end = 0;
        for (int i = 0; i < piece.count; i++) {
            Range part = held.cut(visible(call, piece.position + i));
            if (part.empty()) continue;
            if (i < first) first = i;
            end = i + 1;
            if (part.from != held.from || part.to != held.to) continue;
            if (i < whole_first) whole_first = i;
            whole_end = i + 1;
        }

        int group = call.group, columns = round_up(int(held.to - start)), from = int(held.from - start) / LANES * LANES;
        float* weights = scratch.weights + int64_t(first) * group * TILE;
        const float* queries = scratch.queries + int64_t(first) * group * call.dim;
        product({queries, call.dim, scratch.keys, TILE, weights, TILE, 0, call.dim, false}, (end - first) * group, from, columns);
        for (int i = first; i < end; i++) {
            Range part = held.cut(visible(call, piece.position + i));
            for (int query = i * group; query < (i + 1) * group; query++)
                weigh(scratch.weights + int64_t(query) * TILE, int(part.from - start), int(part.to - start),
                      scratch.span + query * state_floats, padded);
        }
        for (int i = first; i < end; i++) {
            if (i == whole_first) {
                add_values(i, whole_end, held, start);
                i = whole_end - 1;
            } else {
                add_values(i, i + 1, held.cut(visible(call, piece.position + i)), start);
            }
        }
    }

    void add_values(int token, int end, Range part, int64_t start) {
        int64_t query = int64_t(token) * call.group;
        float* sums = scratch.span + query * state_floats + 2 * LANES;
        product({scratch.weights + query * TILE, TILE, scratch.values, padded, sums, state_floats, int(part.from - start),
                 int(part.to - start), true},
                (end - token) * call.group, 0, padded);
    }
};

template <class T>
static void load_queries(const AttentionCall& call, const Piece& piece, float* out) {
    for (int i = 0; i < piece.count; i++) {
        const T* token = static_cast<const T*>(call.query) + (piece.token + i) * call.query_stride;
        const T* from = token + int64_t(piece.head) * call.group * call.dim;
        for (int j = 0; j < call.group * call.dim; j++) *out++ = widen(from[j]) * call.scale;
    }
}

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
    if (call.type == Element::float32)
        load_queries<float>(call, piece, scratch.queries);
    else
        load_queries<Bfloat16>(call, piece, scratch.queries);
    if (call.region_type == Element::float32)
        attend_piece<float>(call, piece, following, scratch, workspace);
    else
        attend_piece<Bfloat16>(call, piece, following, scratch, workspace);
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

template <class From, class To>
static void store_rows(const AttentionCall& call, const void* from, int64_t stride, void* to, int64_t token, int64_t slot) {
    const From* source = static_cast<const From*>(from) + token * stride;
    To* block = static_cast<To*>(to) + (slot >> call.block_shift) * call.block_stride;
    int64_t offset = slot & ((int64_t(1) << call.block_shift) - 1);
    for (int head = 0; head < call.num_kv_heads; head++) {
        int64_t at = ((int64_t(head) << call.block_shift) + offset) * call.dim;
        convert_row(source + int64_t(head) * call.dim, call.dim, block + at);
    }
}

template <class From, class To>
static void store_both(const AttentionCall& call, int64_t token, int64_t slot) {
    store_rows<From, To>(call, call.key, call.key_stride, call.keys, token, slot);
    store_rows<From, To>(call, call.value, call.value_stride, call.values, token, slot);
}

static void store_token(const AttentionCall& call, int64_t token, int64_t slot) {
    bool from_wide = call.type == Element::float32, to_wide = call.region_type == Element::float32;
    if (from_wide && to_wide)
        store_both<float, float>(call, token, slot);
    else if (from_wide)
        store_both<float, Bfloat16>(call, token, slot);
    else if (to_wide)
        store_both<Bfloat16, float>(call, token, slot);
    else
        store_both<Bfloat16, Bfloat16>(call, token, slot);
}

}  // namespace octavo::OCTAVO_ISA
