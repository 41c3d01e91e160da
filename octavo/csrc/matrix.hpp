// A weight as the products read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "kernels.hpp"

namespace octavo {

// Inputs that share a scale.
constexpr int GROUP = 32;

enum class Storage { float32, bfloat16, bytes, nibbles };

// What a grouped weight is packed from: codes [outputs, inputs], scales and minimums (or null) [outputs, groups of inputs].
struct GroupedSource {
    const uint8_t* codes;
    const Float16* scales;
    const Float16* minimums;
    int zero;
};

// A weight [outputs, inputs] in panels of 16 outputs, each one stretch of memory. Each 32-bit word of a step holds an output's next
// inputs; what pads the last panel and the last step is zero.
//   float32    [steps][16] floats, an input a step
//   bfloat16   [steps][16][2], two inputs a step
//   bytes      [steps][16][4] codes, four inputs a step, 8 steps a group; then scales [groups][16], then minimums likewise
//   nibbles    [steps][16][4], 4 steps a group: codes of its first 16 inputs in the lower halves, of the others in the upper
class Matrix {
public:
    Matrix(const float* weight, int64_t outputs, int64_t inputs, int64_t stride);
    Matrix(const Bfloat16* weight, int64_t outputs, int64_t inputs, int64_t stride);
    Matrix(Storage storage, const GroupedSource& source, int64_t outputs, int64_t inputs);

    Storage storage() const { return kind; }
    bool is_grouped() const { return kind == Storage::bytes || kind == Storage::nibbles; }
    bool has_minimums() const { return minimums_at > scales_at; }
    int zero() const { return zero_code; }
    int64_t outputs() const { return num_outputs; }
    int64_t inputs() const { return num_inputs; }
    int64_t panels() const { return (num_outputs + PANEL - 1) / PANEL; }
    int64_t steps() const { return num_steps; }
    int64_t groups() const { return (num_inputs + GROUP - 1) / GROUP; }
    int64_t panel_bytes() const { return bytes_of_panel; }
    size_t bytes() const { return panels() * bytes_of_panel; }

    const uint8_t* words(int64_t panel) const { return memory.get() + panel * bytes_of_panel; }
    const Float16* scales(int64_t panel) const { return reinterpret_cast<const Float16*>(words(panel) + scales_at); }
    const Float16* minimums(int64_t panel) const { return reinterpret_cast<const Float16*>(words(panel) + minimums_at); }

private:
    struct Free {
        void operator()(uint8_t* bytes) const { std::free(bytes); }
    };

    Matrix(Storage storage, int64_t outputs, int64_t inputs, int64_t inputs_per_step, bool minimums, int zero);
    void pack_dense(const void* weight, int64_t stride, int element);
    void pack_codes(const GroupedSource& source, int64_t panel);
    void pack_halves(const Float16* from, int64_t panel, int64_t at);

    Storage kind;
    int zero_code;
    int64_t num_outputs, num_inputs, num_steps;
    int64_t scales_at = 0, minimums_at = 0, bytes_of_panel;
    std::unique_ptr<uint8_t[], Free> memory;
};

}  // namespace octavo
