#define OCTAVO_ISA avx512
#include "table.hpp"

namespace octavo {

const Kernels& avx512_kernels() {
    static const Kernels kernels = avx512::table("avx512");
    return kernels;
}

}  // namespace octavo
