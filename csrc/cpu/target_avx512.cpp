#define ASTRAI_ISA avx512
#include "isa/avx512.h"

#include "target.h"

namespace astrai {

constexpr Kernels avx512_kernels = avx512::table("avx512");

}  // namespace astrai
