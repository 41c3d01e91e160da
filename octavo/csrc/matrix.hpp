// A weight as the products read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels.hpp"

namespace octavo {

// Inputs that share a scale.
constexpr int GROUP = 32;

// Bytes that the codes of a group take in a panel, and the group with its scales.
constexpr int64_t code_bytes(bool nibbles) { return GROUP * PANEL / (nibbles ? 2 : 1); }
constexpr int64_t group_bytes(bool nibbles, bool minimums) { return code_bytes(nibbles) + PANEL * sizeof(Float16) * (minimums ? 2 : 1); }

enum class Storage { float32, bfloat16, bytes, nibbles };

// What a grouped weight is packed from: codes [outputs, inputs], scales and minimums (or null) [outputs, groups of inputs].
struct GroupedSource {
    const uint8_t* codes;
    const Float16* scales;
    const Float16* minimums;
    int zero;
};

// A weight [outputs, inputs] in panels of 16 outputs. A panel is read once, from its beginning to its end, and the next one follows:
// the processor fetches one such stream ahead by itself, and few rows wait for nothing else. Each 32-bit word of a step holds an
// output's next inputs; what pads the last panel and the last step is zero.
//   float32    [steps][16] floats, an input a step
//   bfloat16   [steps][16][2], two inputs a step
//   bytes      [groups]: codes [8][16][4], four inputs a step; scales [16]; minimums [16] where it has them
//   nibbles    [groups]: codes [4][16][4], of its first 16 inputs in the lower halves, of the others in the upper; then likewise
class Matrix {
public:
    Matrix(const float* weight, int64_t outputs, int64_t inputs, int64_t stride);
    Matrix(const Bfloat16* weight, int64_t outputs, int64_t inputs, int64_t stride);
    Matrix(Storage storage, const GroupedSource& source, int64_t outputs, int64_t inputs);

    Storage storage() const { return kind; }
    bool is_grouped() const { return kind == Storage::bytes || kind == Storage::nibbles; }
    bool has_minimums() const { return minimums; }
    int zero() const { return zero_code; }
    int64_t outputs() const { return num_outputs; }
    int64_t inputs() const { return num_inputs; }
    int64_t panels() const { return (num_outputs + PANEL - 1) / PANEL; }
    int64_t steps() const { return num_steps; }
    int64_t groups() const { return (num_inputs + GROUP - 1) / GROUP; }
    int64_t group_bytes() const { return octavo::group_bytes(kind == Storage::nibbles, minimums); }
    int64_t panel_bytes() const { return bytes_of_panel; }
    size_t bytes() const { return panels() * bytes_of_panel; }

    const uint8_t* words(int64_t panel) const { return memory.get() + panel * bytes_of_panel; }

private:
    Matrix(Storage storage, int64_t outputs, int64_t inputs, int64_t inputs_per_step, bool minimums, int zero);
    void pack_dense(const void* weight, int64_t stride, int element);
    void pack_codes(const GroupedSource& source, int64_t panel);
    void pack_halves(const Float16* from, int64_t panel, int64_t at);

    Storage kind;
    bool minimums;
    int zero_code;
    int64_t num_outputs, num_inputs, num_steps, bytes_of_panel;
    std::shared_ptr<uint8_t[]> memory;
};

}  // namespace octavo
