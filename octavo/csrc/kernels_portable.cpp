#define OCTAVO_ISA portable
#include "table.hpp"

namespace octavo {

const Kernels& portable_kernels() {
    static const Kernels kernels = portable::table("portable");
    return kernels;
}

}  // namespace octavo
