#define ASTRAI_ISA portable
#include "isa/portable.h"

#include "target.h"

namespace astrai {

const Kernels &portable_kernels() {
    static const Kernels kernels = portable::table("portable", [] { return true; });
    return kernels;
}

}  // namespace astrai
