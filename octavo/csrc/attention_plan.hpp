// Who attends to what in one step, cut into pieces that threads take one by one.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.hpp"

namespace octavo {

// The KV region [num_blocks, num_layers, 2, num_kv_heads, head_bytes], and the query heads that share a KV head.
struct Geometry {
    int64_t num_blocks, num_layers, head_bytes;
    int num_kv_heads, block_size, dim, group;
    Element type;
};

// What a layer's call adds to the plan: see AttentionCall.
struct LayerPointers {
    const void *query, *key, *value;
    const float *cos, *sin;
    void *out, *region;
    Element type;
    int64_t query_stride, key_stride, value_stride, layer;
    int half;
    float scale, softcap;
};

class AttentionPlan {
public:
    // counts, starts, table_lengths: [rows]. tables: the rows' tables one after another. slots: [tokens], negative where a token
    // is not kept. window: positions that a token sees, 0 for all. Throws std::out_of_range where a row needs a block that its
    // table lacks, or that the region lacks.
    AttentionPlan(const Geometry& geometry, int64_t rows, const int64_t* counts, const int64_t* starts, const int64_t* table_lengths,
                  const int64_t* tables, int64_t tokens, const int64_t* slots, int64_t window);

    void run(const Kernels& kernels, const LayerPointers& layer) const;

private:
    void add_row(const int32_t* table, int64_t token, int64_t count, int64_t start);
    void check_row(const int64_t* table, int64_t length, int64_t count, int64_t start, int64_t row) const;

    Geometry geometry;
    int64_t window;
    int block_shift = 0, most_queries = 0;
    int64_t num_states = 0;
    std::vector<int32_t> tables;
    std::vector<int64_t> slots;
    std::vector<Piece> pieces, merges;
};

}  // namespace octavo
