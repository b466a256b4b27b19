#define ASTRAI_ISA avx512
#include "isa/avx512.h"

#include "target.h"

namespace astrai {

const Kernels &avx512_kernels() {
    static const Kernels kernels = avx512::table("avx512", [] {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    });
    return kernels;
}

}  // namespace astrai
