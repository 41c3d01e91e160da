// The Python face of the kernels. Tensors come as addresses and strides in elements; the caller keeps them alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention_plan.hpp"
#include "by_token.hpp"
#include "experts.hpp"
#include "kernels.hpp"
#include "matrix.hpp"
#include "products.hpp"
#include "recording.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Integers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The instruction sets that this processor runs, fastest first.
std::vector<const Kernels*> usable() {
    std::vector<const Kernels*> out;
#ifdef OCTAVO_X86
    auto avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    auto avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    auto avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    // Intel's vdpbf16ps takes longer than the two multiply-adds it stands for.
    auto slow_bf16 = __builtin_cpu_is("intel");
    if (avx512_bf16 && !slow_bf16) out.push_back(&avx512_bf16::kernels);
    if (avx512) out.push_back(&avx512::kernels);
    if (avx512_bf16 && slow_bf16) out.push_back(&avx512_bf16::kernels);
    if (avx2) out.push_back(&avx2::kernels);
#endif
    out.push_back(&portable::kernels);
    return out;
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> out;
    for (const Kernels* kernels : usable()) out.push_back(kernels->name);
    return out;
}

const Kernels* find(const std::string& name) {
    for (const Kernels* kernels : usable())
        if (kernels->name == name) return kernels;
    throw std::invalid_argument("no kernels for " + name + " on this processor");
}

Element element(bool is_bfloat16) { return is_bfloat16 ? Element::bfloat16 : Element::float32; }

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// The kernels of one instruction set.
class Backend {
public:
    explicit Backend(const std::string& name) : kernels(find(name)) {}

    std::string name() const { return kernels->name; }

    // Calls are added to it as they are made, until it is null again.
    void record(Recording* into) { recording = into; }

    void paged_attention(const AttentionPlan& plan, uintptr_t query, int64_t query_stride, uintptr_t key, int64_t key_stride,
                         uintptr_t value, int64_t value_stride, uintptr_t cos, uintptr_t sin, int half, uintptr_t out, bool bfloat16,
                         uintptr_t region, int64_t layer, float scale, float softcap) {
        const LayerPointers pointers{at<void>(query), at<void>(key), at<void>(value), at<float>(cos), at<float>(sin), at<void>(out), at<void>(region),
                                     element(bfloat16), query_stride, key_stride, value_stride, layer, half, scale, softcap};
        plan.run(*kernels, pointers);
        if (!recording) return;
        const size_t place = recording->place_of(plan);
        recording->add([=, kernels = kernels](const Recording::Plans& plans) { plans[place]->run(*kernels, pointers); });
    }

    void rms_norm(uintptr_t x, int64_t x_stride, uintptr_t residual, uintptr_t weight, uintptr_t out, uintptr_t sum, bool bfloat16,
                  bool weight_bfloat16, int64_t tokens, int heads, int size, float eps, float multiplier) {
        const NormCall call{at<void>(x), at<void>(residual), at<void>(weight), at<void>(out), at<void>(sum), element(bfloat16),
                            element(weight_bfloat16), x_stride, heads, size, eps, multiplier};
        perform([=, kernels = kernels] { by_token(kernels->rms_norm, call, tokens, int64_t(heads) * size); });
    }

    void activate_and_mul(uintptr_t gate_up, int64_t stride, uintptr_t out, bool bfloat16, int activation, int64_t tokens, int size) {
        const GateCall call{at<void>(gate_up), at<void>(out), element(bfloat16), Activation(activation), stride, size};
        perform([=, kernels = kernels] { by_token(kernels->activate_and_mul, call, tokens, size); });
    }

    void linear(const Matrix& matrix, uintptr_t x, int64_t x_stride, bool x_bfloat16, int64_t rows, uintptr_t bias, uintptr_t out,
                bool out_bfloat16) {
        const LinearCall call{&matrix, at<void>(x), element(x_bfloat16), x_stride, rows, at<float>(bias), at<void>(out),
                              element(out_bfloat16), matrix.outputs()};
        perform([=, kernels = kernels] { octavo::linear(*kernels, call); });
    }

    void route(uintptr_t logits, int64_t stride, int64_t tokens, int size, int count, bool over_chosen, uintptr_t places, uintptr_t weights) {
        if (count < 1 || count > size) throw std::invalid_argument(std::to_string(count) + " of " + std::to_string(size) + " experts");
        const RouteCall call{at<float>(logits), stride, size, count, over_chosen, at<int64_t>(places), at<float>(weights)};
        perform([=, kernels = kernels] { by_token(kernels->route, call, tokens, size); });
    }

    void experts(std::vector<const Matrix*> gate_up, std::vector<const Matrix*> down, uintptr_t x, int64_t x_stride, bool bfloat16,
                 int64_t tokens, uintptr_t choices, uintptr_t weights, int count, int activation, uintptr_t out) {
        perform([=, kernels = kernels] {
            octavo::experts(*kernels, {at<void>(x), element(bfloat16), x_stride, tokens, at<int64_t>(choices), at<float>(weights), count, gate_up,
                                       down, Activation(activation), at<void>(out)});
        });
    }

    void embedding(const Matrix& matrix, uintptr_t ids, int64_t tokens, uintptr_t out, bool out_bfloat16, float scale) {
        const EmbeddingCall call{&matrix, at<int64_t>(ids), tokens, at<void>(out), element(out_bfloat16), matrix.inputs(), scale};
        perform([=, kernels = kernels] { octavo::embedding(*kernels, call); });
    }

    void softcap(uintptr_t x, int64_t stride, int64_t rows, int64_t size, float cap) {
        const CapCall call{at<float>(x), stride, size, cap};
        perform([=, kernels = kernels] { by_token(kernels->softcap, call, rows, size); });
    }

    void mask(uintptr_t x, int64_t stride, int size, uintptr_t rows, uintptr_t bits, int64_t words, int64_t count) const {
        by_token(kernels->mask, MaskCall{at<float>(x), stride, size, at<int64_t>(rows), at<int32_t>(bits), words}, count, size);
    }

    void argmax(uintptr_t x, int64_t stride, int64_t rows, int64_t size, uintptr_t peaks, uintptr_t places) const {
        by_token(kernels->argmax, ArgmaxCall{at<float>(x), stride, size, at<float>(peaks), at<int64_t>(places)}, rows, size);
    }

    void sample(uintptr_t x, int64_t stride, int64_t rows, int64_t size, uintptr_t peaks, uintptr_t temperature, uintptr_t min_p,
                uintptr_t top_k, uintptr_t top_p, uintptr_t uniform, uintptr_t places) const {
        const SampleCall call{at<float>(x),       stride,           size,           at<float>(peaks),    at<float>(temperature),
                              at<float>(min_p),   at<int64_t>(top_k), at<double>(top_p), at<double>(uniform), at<int64_t>(places)};
        by_row(kernels->sample, call, rows);
    }

    void score(uintptr_t x, int64_t stride, int64_t rows, int64_t size, uintptr_t token_ids, int64_t count, uintptr_t logprobs, uintptr_t ids,
               uintptr_t ranks) const {
        by_row(kernels->score, ScoreCall{at<float>(x), stride, size, at<int64_t>(token_ids), count, at<float>(logprobs), at<int64_t>(ids), at<int64_t>(ranks)}, rows);
    }

private:
    template <class Call>
    void by_row(void (*kernel)(const Call&, int64_t, char*), const Call& call, int64_t rows) const {
        const size_t bytes = kernels->look_bytes(call.size);
#pragma omp parallel if (rows > 1)
        {
            thread_local std::vector<char> scratch;
            if (scratch.size() < bytes) scratch.resize(bytes);
#pragma omp for schedule(dynamic)
            for (int64_t row = 0; row < rows; row++) kernel(call, row, scratch.data());
        }
    }

    template <class Work>
    void perform(Work work) {
        work();
        if (recording) recording->add([work](const Recording::Plans&) { work(); });
    }

    const Kernels* kernels;
    Recording* recording = nullptr;
};

Matrix* dense(uintptr_t weight, int64_t outputs, int64_t inputs, int64_t stride, bool bfloat16) {
    if (bfloat16) return new Matrix(at<Bfloat16>(weight), outputs, inputs, stride);
    return new Matrix(at<float>(weight), outputs, inputs, stride);
}

Matrix* grouped(int bits, uintptr_t codes, uintptr_t scales, uintptr_t minimums, int zero, int64_t outputs, int64_t inputs) {
    if (bits != 4 && bits != 8) throw std::invalid_argument("a grouped weight has 4 or 8 bits, not " + std::to_string(bits));
    return new Matrix(bits == 4 ? Storage::nibbles : Storage::bytes, {at<uint8_t>(codes), at<Float16>(scales), at<Float16>(minimums), zero},
                      outputs, inputs);
}

void make_plan(AttentionPlan* self, Integers counts, Integers starts, Integers table_lengths, Integers tables, uintptr_t slots, int64_t tokens,
               int64_t window, int64_t num_blocks, int64_t num_layers, int num_kv_heads, int block_size, int dim, int group, int element,
               int64_t head_bytes) {
    int64_t rows = counts.shape(0), length = 0;
    if (int64_t(starts.shape(0)) != rows || int64_t(table_lengths.shape(0)) != rows)
        throw std::invalid_argument("counts, starts and table_lengths must be equally long");
    for (int64_t row = 0; row < rows; row++) length += table_lengths.data()[row];
    if (int64_t(tables.shape(0)) != length) throw std::invalid_argument("table_lengths do not add up to the length of tables");
    new (self) AttentionPlan({num_blocks, num_layers, head_bytes, num_kv_heads, block_size, dim, group, Element(element)}, rows, counts.data(), starts.data(),
                             table_lengths.data(), tables.data(), tokens, at<int64_t>(slots), window);
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("instruction_sets", &instruction_sets, "Names that Backend takes on this processor, fastest first.");

    nb::class_<AttentionPlan>(m, "AttentionPlan", "Who attends to what in one step, for all layers with one window (0: no window).")
        .def("__init__", &make_plan, "counts"_a, "starts"_a, "table_lengths"_a, "tables"_a, "slots"_a, "tokens"_a, nb::kw_only(), "window"_a,
             "num_blocks"_a, "num_layers"_a, "num_kv_heads"_a, "block_size"_a, "dim"_a, "group"_a, "element"_a, "head_bytes"_a);

    nb::class_<Matrix>(m, "Matrix", "A weight [outputs, inputs], copied into the layout of the products.")
        .def_static("dense", &dense, nb::rv_policy::take_ownership, nb::call_guard<nb::gil_scoped_release>())
        .def_static("grouped", &grouped, nb::rv_policy::take_ownership, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("shape", [](const Matrix& matrix) { return std::pair(matrix.outputs(), matrix.inputs()); })
        .def_prop_ro("nbytes", &Matrix::bytes);

    nb::class_<Recording>(m, "Recording", "The calls of one forward pass, made again by `run` with other attention plans.")
        .def(nb::init<>())
        .def("run", &Recording::run, "plans"_a, nb::call_guard<nb::gil_scoped_release>());

    nb::class_<Backend>(m, "Backend", "The kernels of one instruction set; see octavo.ops.interface.Ops.")
        .def(nb::init<const std::string&>())
        .def_prop_ro("name", &Backend::name)
        .def("record", &Backend::record, "into"_a.none(), nb::keep_alive<1, 2>())
        .def("paged_attention", &Backend::paged_attention, nb::call_guard<nb::gil_scoped_release>())
        .def("rms_norm", &Backend::rms_norm, nb::call_guard<nb::gil_scoped_release>())
        .def("activate_and_mul", &Backend::activate_and_mul, nb::call_guard<nb::gil_scoped_release>())
        .def("linear", &Backend::linear, nb::call_guard<nb::gil_scoped_release>())
        .def("route", &Backend::route, nb::call_guard<nb::gil_scoped_release>())
        .def("experts", &Backend::experts, nb::call_guard<nb::gil_scoped_release>())
        .def("embedding", &Backend::embedding, nb::call_guard<nb::gil_scoped_release>())
        .def("softcap", &Backend::softcap, nb::call_guard<nb::gil_scoped_release>())
        .def("mask", &Backend::mask, nb::call_guard<nb::gil_scoped_release>())
        .def("argmax", &Backend::argmax, nb::call_guard<nb::gil_scoped_release>())
        .def("sample", &Backend::sample, nb::call_guard<nb::gil_scoped_release>())
        .def("score", &Backend::score, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace octavo
