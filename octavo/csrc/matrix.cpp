#include "matrix.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace octavo {

constexpr int64_t CACHE_LINE = 64, WORD = 4;
// A weight of this size is worth whole huge pages: the last is half empty on average.
constexpr size_t HUGE_PAGE = size_t(2) << 20, WORTH_HUGE_PAGES = 4 * HUGE_PAGE;

static int64_t divided(int64_t size, int64_t by) { return (size + by - 1) / by; }

static uint8_t* allocate(size_t bytes) {
    const bool huge = bytes >= WORTH_HUGE_PAGES;
    void* memory = nullptr;
    if (posix_memalign(&memory, huge ? HUGE_PAGE : CACHE_LINE, std::max<size_t>(bytes, 1))) throw std::bad_alloc();
#ifdef __linux__
    if (huge) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return static_cast<uint8_t*>(memory);
}

Matrix::Matrix(Storage storage, int64_t outputs, int64_t inputs, int64_t inputs_per_step, bool minimums, int zero)
    : kind(storage), zero_code(zero), num_outputs(outputs), num_inputs(inputs) {
    if (outputs <= 0 || inputs <= 0) throw std::invalid_argument("a weight needs at least one output and one input");
    num_steps = is_grouped() ? groups() * (GROUP / inputs_per_step) : divided(inputs, inputs_per_step);
    bytes_of_panel = num_steps * PANEL * WORD;
    if (is_grouped()) {
        const int64_t halves = groups() * PANEL * int64_t(sizeof(Float16));
        scales_at = bytes_of_panel;
        minimums_at = scales_at + (minimums ? halves : 0);
        bytes_of_panel = divided(minimums_at + halves, CACHE_LINE) * CACHE_LINE;
    }
    memory.reset(allocate(bytes()));
}

Matrix::Matrix(const float* weight, int64_t outputs, int64_t inputs, int64_t stride)
    : Matrix(Storage::float32, outputs, inputs, 1, false, 0) {
    pack_dense(weight, stride, sizeof(float));
}

Matrix::Matrix(const Bfloat16* weight, int64_t outputs, int64_t inputs, int64_t stride)
    : Matrix(Storage::bfloat16, outputs, inputs, 2, false, 0) {
    pack_dense(weight, stride, sizeof(Bfloat16));
}

Matrix::Matrix(Storage storage, const GroupedSource& source, int64_t outputs, int64_t inputs)
    : Matrix(storage, outputs, inputs, storage == Storage::nibbles ? 8 : 4, source.minimums, source.zero) {
    const int64_t count = panels();
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < count; panel++) {
        std::memset(memory.get() + panel * bytes_of_panel, 0, bytes_of_panel);
        pack_codes(source, panel);
        pack_halves(source.scales, panel, scales_at);
        if (source.minimums) pack_halves(source.minimums, panel, minimums_at);
    }
}

void Matrix::pack_dense(const void* weight, int64_t stride, int element) {
    const int64_t count = panels(), row_bytes = num_inputs * element;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < count; panel++) {
        uint8_t* to = memory.get() + panel * bytes_of_panel;
        std::memset(to, 0, bytes_of_panel);
        const int64_t lanes = std::min<int64_t>(PANEL, num_outputs - panel * PANEL);
        for (int64_t lane = 0; lane < lanes; lane++) {
            const char* row = static_cast<const char*>(weight) + (panel * PANEL + lane) * stride * element;
            for (int64_t at = 0; at < row_bytes; at += WORD)
                std::memcpy(to + at * PANEL + lane * WORD, row + at, std::min(WORD, row_bytes - at));
        }
    }
}

void Matrix::pack_codes(const GroupedSource& source, int64_t panel) {
    uint8_t* to = memory.get() + panel * bytes_of_panel;
    const int64_t lanes = std::min<int64_t>(PANEL, num_outputs - panel * PANEL);
    for (int64_t lane = 0; lane < lanes; lane++) {
        const uint8_t* row = source.codes + (panel * PANEL + lane) * num_inputs;
        for (int64_t k = 0; k < num_inputs; k++) {
            if (kind == Storage::bytes) {
                to[(k / WORD * PANEL + lane) * WORD + k % WORD] = row[k];
                continue;
            }
            const int64_t group = k / GROUP, place = k % (GROUP / 2), upper = k % GROUP / (GROUP / 2);
            to[((group * 4 + place / WORD) * PANEL + lane) * WORD + place % WORD] |= uint8_t((row[k] & 15) << 4 * upper);
        }
    }
}

void Matrix::pack_halves(const Float16* from, int64_t panel, int64_t at) {
    auto to = reinterpret_cast<Float16*>(memory.get() + panel * bytes_of_panel + at);
    const int64_t lanes = std::min<int64_t>(PANEL, num_outputs - panel * PANEL), count = groups();
    for (int64_t lane = 0; lane < lanes; lane++)
        for (int64_t group = 0; group < count; group++) to[group * PANEL + lane] = from[(panel * PANEL + lane) * count + group];
}

}  // namespace octavo
