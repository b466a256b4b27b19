#define ASTRAI_ISA portable
#include "isa/portable.h"

#include "target.h"

namespace astrai {

constexpr Kernels portable_kernels = portable::table("portable");

}  // namespace astrai
