// Floats kept from call to call, aligned to a cache line.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

namespace octavo {

class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(floats); }

    // At least `count` floats, holding anything; what was taken before is gone.
    float* take(size_t count) {
        if (count <= size) return floats;
        std::free(floats);
        size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
        floats = static_cast<float*>(std::aligned_alloc(64, bytes));
        size = floats ? count : 0;
        if (!floats) throw std::bad_alloc();
        std::memset(floats, 0, bytes);
        return floats;
    }

private:
    float* floats = nullptr;
    size_t size = 0;
};

}  // namespace octavo
