#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace astrai {

namespace {
constexpr size_t kHuge = size_t(2) << 20;  // of x86-64 and of ARM with 4 KiB base pages

// Small blocks would waste most of a huge page each.
size_t mapped(size_t bytes) { return bytes >= kHuge ? (bytes + kHuge - 1) / kHuge * kHuge + kHuge : bytes; }
}  // namespace

void *allocate(size_t bytes) {
    if (bytes == 0) return nullptr;
    void *memory = mmap(nullptr, mapped(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    if (bytes >= kHuge) madvise(memory, mapped(bytes), MADV_HUGEPAGE);  // a kernel without huge pages says no: no harm
    return memory;
}

void release(void *memory, size_t bytes) {
    if (memory != nullptr) munmap(memory, mapped(bytes));
}

}  // namespace astrai
