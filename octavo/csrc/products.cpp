#include "products.hpp"

#include <omp.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "buffer.hpp"
#include "matrix.hpp"

namespace octavo {

// Below this many products the threads cost more than they give.
constexpr int64_t WORTH_SHARING = 65536;
// A row's share of the above that each thread may as well prepare for itself, as it would wait for the others.
constexpr int64_t ROWS_PREPARED_BY_ALL = 8;
// Rows that go through a panel one after another: it stays in the nearest cache, they in the next.
constexpr int64_t ROWS_TOGETHER = 192;
// Panels that one thread does together.
constexpr int64_t PANELS_TOGETHER = 2;
// Panels of a part that one thread takes at a time.
constexpr int64_t PANELS_TAKEN = 8;

// Rounded up, for a numerator that may be negative.
static int64_t divided(int64_t size, int64_t by) { return size > 0 ? (size + by - 1) / by : 0; }

static char* take(Buffer& buffer, size_t bytes) { return reinterpret_cast<char*>(buffer.take((bytes + 3) / 4)); }

void linear(const Kernels& kernels, const LinearCall& call) {
    const Matrix& matrix = *call.matrix;
    const int64_t rows = call.rows, row_bytes = kernels.prepared_bytes(call);
    const bool shared = row_bytes && rows > ROWS_PREPARED_BY_ALL;
    static thread_local Buffer shared_rows;
    char* prepared = shared ? take(shared_rows, rows * row_bytes) : nullptr;
    const int64_t blocks = divided(rows, ROWS_TOGETHER), units = divided(matrix.panels(), PANELS_TOGETHER);
#pragma omp parallel if (rows * matrix.outputs() * matrix.inputs() >= WORTH_SHARING)
    {
        static thread_local Buffer own_rows, scratch_buffer;
        char* scratch = take(scratch_buffer, kernels.product_bytes(call));
        const char* at = static_cast<const char*>(call.x);
        int64_t stride = call.x_stride * (call.x_type == Element::bfloat16 ? 2 : 4);
        if (shared) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) kernels.prepare(call, row, prepared + row * row_bytes);
            at = prepared;
            stride = row_bytes;
        } else if (row_bytes) {
            char* own = take(own_rows, rows * row_bytes);
            for (int64_t row = 0; row < rows; row++) kernels.prepare(call, row, own + row * row_bytes);
            at = own;
            stride = row_bytes;
        }
        // A thread takes a stretch of panels, with all blocks of rows save perhaps at its ends.
        const int64_t items = blocks * units, thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const int64_t from = items * thread / threads, to = items * (thread + 1) / threads;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = rows * block / blocks, end = rows * (block + 1) / blocks;
            const int64_t first_panel = divided(from - block, blocks) * PANELS_TOGETHER;
            const int64_t end_panel = std::min(matrix.panels(), divided(to - block, blocks) * PANELS_TOGETHER);
            if (first_panel < end_panel) kernels.multiply(call, {at + first * stride, stride, first, end}, first_panel, end_panel, scratch);
        }
    }
}

void linear_in_parts(const Kernels& kernels, const LinearCall& call, const std::vector<Part>& parts) {
    struct Item {
        LinearCall call;
        int64_t first, end, first_panel;
    };
    std::vector<Item> items;
    int64_t row_bytes = 0, scratch_bytes = 0, work = 0;
    auto with_matrix = [&](const Part& part) {
        LinearCall own = call;
        own.matrix = part.matrix;
        return own;
    };
    for (const Part& part : parts) {
        const LinearCall own = with_matrix(part);
        row_bytes = std::max<int64_t>(row_bytes, kernels.prepared_bytes(own));
        scratch_bytes = std::max<int64_t>(scratch_bytes, kernels.product_bytes(own));
        work += (part.end - part.first) * part.matrix->outputs() * part.matrix->inputs();
        for (int64_t panel = 0; panel < part.matrix->panels(); panel += PANELS_TAKEN) items.push_back({own, part.first, part.end, panel});
    }
    static thread_local Buffer prepared_rows;
    char* prepared = take(prepared_rows, call.rows * row_bytes);
#pragma omp parallel if (work >= WORTH_SHARING)
    {
        static thread_local Buffer scratch_buffer;
        char* scratch = take(scratch_buffer, scratch_bytes);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < parts.size(); i++) {
            const LinearCall own = with_matrix(parts[i]);
            if (!kernels.prepared_bytes(own)) continue;
            for (int64_t row = parts[i].first; row < parts[i].end; row++) kernels.prepare(own, row, prepared + row * row_bytes);
        }
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < items.size(); i++) {
            const Item& item = items[i];
            const bool as_it_is = !kernels.prepared_bytes(item.call);
            const char* at = as_it_is ? static_cast<const char*>(call.x) : prepared;
            const int64_t stride = as_it_is ? call.x_stride * (call.x_type == Element::bfloat16 ? 2 : 4) : row_bytes;
            const int64_t rows = item.end - item.first, blocks = divided(rows, ROWS_TOGETHER);
            const int64_t end_panel = std::min(item.call.matrix->panels(), item.first_panel + PANELS_TAKEN);
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t first = item.first + rows * block / blocks, end = item.first + rows * (block + 1) / blocks;
                kernels.multiply(item.call, {at + first * stride, stride, first, end}, item.first_panel, end_panel, scratch);
            }
        }
    }
}

void embedding(const Kernels& kernels, const EmbeddingCall& call) {
    const int64_t outputs = call.matrix->outputs();
    for (int64_t token = 0; token < call.tokens; token++)
        if (call.ids[token] < 0 || call.ids[token] >= outputs)
            throw std::out_of_range("id " + std::to_string(call.ids[token]) + " of an embedding of " + std::to_string(outputs));
#pragma omp parallel for schedule(static) if (call.tokens * call.matrix->inputs() >= WORTH_SHARING)
    for (int64_t token = 0; token < call.tokens; token++) kernels.embed(call, token);
}

}  // namespace octavo
