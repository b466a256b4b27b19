#define ASTRAI_ISA avx2
#include "isa/avx2.h"

#include "target.h"

namespace astrai {

constexpr Kernels avx2_kernels = avx2::table("avx2");

}  // namespace astrai
