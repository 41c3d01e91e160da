#include "matrix.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>

namespace octavo {

constexpr int64_t CACHE_LINE = 64, WORD = 4;
// Weights lie side by side in slabs of huge pages: pages of 4 KiB, or an allocation each, cost a decode step 4 to 6%.
constexpr size_t HUGE_PAGE = size_t(2) << 20, SLAB = 16 * HUGE_PAGE;

static int64_t divided(int64_t size, int64_t by) { return (size + by - 1) / by; }

using Memory = std::shared_ptr<uint8_t[]>;

// Fresh from the system: what the heap gives has been used, and would stay resident where no weight comes to lie.
static Memory huge_pages(size_t bytes) {
    const size_t mapped = bytes + HUGE_PAGE;
    void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    const Memory whole(static_cast<uint8_t*>(memory), [mapped](uint8_t* at) { munmap(at, mapped); });
    uint8_t* aligned = whole.get() + (HUGE_PAGE - reinterpret_cast<uintptr_t>(memory) % HUGE_PAGE) % HUGE_PAGE;
#ifdef __linux__
    madvise(aligned, bytes, MADV_HUGEPAGE);
#endif
    return {whole, aligned};
}

// A slab lives as long as the last weight in it.
static Memory allocate(size_t bytes) {
    static std::mutex lock;
    static std::weak_ptr<uint8_t[]> latest;
    static size_t used;
    if (bytes >= SLAB / 4) return huge_pages(bytes);
    const std::lock_guard<std::mutex> locked(lock);
    Memory slab = latest.lock();
    if (!slab || used + bytes > SLAB) {
        slab = huge_pages(SLAB);
        latest = slab;
        used = 0;
    }
    uint8_t* memory = slab.get() + used;
    used += bytes;  // whole cache lines, as panels are
    return {std::move(slab), memory};
}

Matrix::Matrix(Storage storage, int64_t outputs, int64_t inputs, int64_t inputs_per_step, bool minimums, int zero)
    : kind(storage), minimums(minimums), zero_code(zero), num_outputs(outputs), num_inputs(inputs) {
    if (outputs <= 0 || inputs <= 0) throw std::invalid_argument("a weight needs at least one output and one input");
    num_steps = is_grouped() ? groups() * (GROUP / inputs_per_step) : divided(inputs, inputs_per_step);
    bytes_of_panel = is_grouped() ? divided(groups() * group_bytes(), CACHE_LINE) * CACHE_LINE : num_steps * PANEL * WORD;
    memory = allocate(bytes());
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
        const int64_t codes = code_bytes(kind == Storage::nibbles);
        pack_halves(source.scales, panel, codes);
        if (source.minimums) pack_halves(source.minimums, panel, codes + PANEL * sizeof(Float16));
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
            uint8_t* group = to + k / GROUP * group_bytes();
            const int64_t upper = kind == Storage::nibbles ? k % GROUP / (GROUP / 2) : 0, place = k % GROUP - upper * (GROUP / 2);
            group[(place / WORD * PANEL + lane) * WORD + place % WORD] |= uint8_t(row[k] << 4 * upper);
        }
    }
}

void Matrix::pack_halves(const Float16* from, int64_t panel, int64_t at) {
    const int64_t lanes = std::min<int64_t>(PANEL, num_outputs - panel * PANEL), count = groups();
    for (int64_t group = 0; group < count; group++) {
        auto to = reinterpret_cast<Float16*>(memory.get() + panel * bytes_of_panel + group * group_bytes() + at);
        for (int64_t lane = 0; lane < lanes; lane++) to[lane] = from[(panel * PANEL + lane) * count + group];
    }
}

}  // namespace octavo
