#include "attention_plan.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>
#include <string>

#include "buffer.hpp"

namespace octavo {

// Queries that share each tile once it is loaded: enough that loading it costs little, few enough that their state stays in cache.
constexpr int64_t QUERIES = 64;

AttentionPlan::AttentionPlan(const Geometry& geometry, int64_t rows, const int64_t* counts, const int64_t* starts,
                             const int64_t* table_lengths, const int64_t* tables, int64_t tokens, const int64_t* slots, int64_t window)
    : geometry(geometry), window(window > 0 ? window : std::numeric_limits<int64_t>::max() / 2), slots(slots, slots + tokens) {
    while (1 << block_shift < geometry.block_size) block_shift++;
    if (1 << block_shift != geometry.block_size) throw std::invalid_argument("block_size must be a power of two");
    if (geometry.dim > MAX_DIM || geometry.dim % 4) throw std::invalid_argument("heads must have a multiple of 4 features, 256 at most");
    int64_t length = 0;
    for (int64_t row = 0; row < rows; row++) length += table_lengths[row];
    this->tables.assign(tables, tables + length);
    int64_t num_slots = geometry.num_blocks * geometry.block_size;
    for (int64_t slot : this->slots)
        if (slot >= num_slots) throw std::out_of_range("slot " + std::to_string(slot) + " of a region of " + std::to_string(num_slots));

    int64_t token = 0, at = 0;
    for (int64_t row = 0; row < rows; row++) {
        check_row(tables + at, table_lengths[row], counts[row], starts[row], row);
        add_row(this->tables.data() + at, token, counts[row], starts[row]);
        token += counts[row];
        at += table_lengths[row];
    }
    if (token != tokens) throw std::invalid_argument("the rows' counts do not add up to the number of slots");
    auto work = [](const Piece& piece) { return piece.count * std::min<int64_t>(piece.position, int64_t(SPAN) * (piece.end_span - piece.first_span)); };
    std::stable_sort(pieces.begin(), pieces.end(), [&](const Piece& a, const Piece& b) { return work(a) > work(b); });
}

void AttentionPlan::check_row(const int64_t* table, int64_t length, int64_t count, int64_t start, int64_t row) const {
    if (count <= 0) return;
    int64_t first = std::max<int64_t>(0, start - window + 1) >> block_shift, last = (start + count - 1) >> block_shift;
    bool covered = start >= 0 && last < length;
    for (int64_t i = first; covered && i <= last; i++) covered = table[i] >= 0 && table[i] < geometry.num_blocks;
    if (!covered) throw std::out_of_range("row " + std::to_string(row) + " sees positions that its block table does not hold");
}

void AttentionPlan::add_row(const int32_t* table, int64_t token, int64_t count, int64_t start) {
    const int64_t tokens_together = std::max<int64_t>(1, QUERIES / geometry.group);
    for (int64_t done = 0; done < count; done += tokens_together) {
        int part = int(std::min(tokens_together, count - done));
        int64_t position = start + done;
        int first_span = int(std::max<int64_t>(0, position - window + 1) / SPAN), end_span = int((position + part - 1) / SPAN + 1);
        most_queries = std::max(most_queries, part * geometry.group);
        for (int head = 0; head < geometry.num_kv_heads; head++) {
            Piece piece{table, token + done, position, -1, part, head, first_span, end_span};
            // A row of many queries is pieces enough; one of few is cut by its context too.
            if (count > tokens_together || end_span - first_span == 1) {
                pieces.push_back(piece);
                continue;
            }
            piece.partial = num_states;
            merges.push_back(piece);
            for (int span = first_span; span < end_span; span++) {
                piece.first_span = span;
                piece.end_span = span + 1;
                piece.partial = num_states;
                pieces.push_back(piece);
                num_states += int64_t(part) * geometry.group;
            }
        }
    }
}

void AttentionPlan::run(const Kernels& kernels, const LayerPointers& layer) const {
    const int64_t half = geometry.num_kv_heads * geometry.head_bytes;
    char* keys = static_cast<char*>(layer.region) + layer.layer * 2 * half;
    AttentionCall call{
        layer.query,           layer.key,      layer.value,     layer.out,  layer.type, layer.query_stride,
        layer.key_stride,      layer.value_stride, layer.cos,   layer.sin,  layer.half, keys,
        keys + half,           geometry.type,  geometry.num_layers * 2 * half, geometry.head_bytes,
        geometry.num_kv_heads, geometry.group, geometry.dim,    block_shift, layer.scale, layer.softcap, window,
    };
    const size_t scratch_floats = kernels.scratch_floats(call, most_queries);
    static thread_local Buffer workspace_buffer;
    float* workspace = workspace_buffer.take(num_states * kernels.state_floats(call));
    const int64_t num_tokens = slots.size(), num_pieces = pieces.size(), num_merges = merges.size();
    std::atomic<int64_t> taken{0};
#pragma omp parallel
    {
        static thread_local Buffer scratch_buffer;
        float* scratch = scratch_buffer.take(scratch_floats);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < num_tokens; token++)
            if (slots[token] >= 0) kernels.store(call, token, slots[token]);
        // A thread takes its next piece before it does the last one, so that it can fetch ahead.
        int64_t mine = taken.fetch_add(1);
        while (mine < num_pieces) {
            int64_t next = taken.fetch_add(1);
            kernels.attend(call, pieces[mine], next < num_pieces ? &pieces[next] : nullptr, scratch, workspace);
            mine = next;
        }
        if (num_merges > 0) {
#pragma omp barrier
        }
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < num_merges; i++) kernels.merge(call, merges[i], scratch, workspace);
    }
}

}  // namespace octavo
