#define ASTRAI_ISA avx2
#include "isa/avx2.h"

#include "target.h"

namespace astrai {

const Kernels &avx2_kernels() {
    static const Kernels kernels = avx2::table("avx2", [] {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    });
    return kernels;
}

}  // namespace astrai
