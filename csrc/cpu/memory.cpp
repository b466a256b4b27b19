#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace astrai {

#if defined(__SANITIZE_ADDRESS__)

// The sanitizer watches the edges of what the C library hands out, not of mapped memory.
void *allocate(size_t bytes) {
    void *memory = nullptr;
    if (bytes == 0) return nullptr;
    if (bytes > (size_t(1) << 40) || posix_memalign(&memory, 64, bytes) != 0) throw std::bad_alloc();
    return std::memset(memory, 0, bytes);
}

void release(void *memory, size_t) { free(memory); }

#else

namespace {
constexpr size_t kHuge = size_t(2) << 20;  // of x86-64 and of ARM with 4 KiB base pages

// Small blocks would waste most of a huge page each.
size_t mapped(size_t bytes) { return bytes >= kHuge ? (bytes + kHuge - 1) / kHuge * kHuge : bytes; }

uint8_t *map(size_t bytes) {
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<uint8_t *>(memory);
}
}  // namespace

void *allocate(size_t bytes) {
    if (bytes == 0) return nullptr;
    const size_t size = mapped(bytes);
    if (size < kHuge) return map(size);
    // Huge pages begin at multiples of their size: what lies around the part that does is given back.
    uint8_t *memory = map(size + kHuge);
    const size_t before = (kHuge - reinterpret_cast<uintptr_t>(memory) % kHuge) % kHuge;
    if (before > 0) munmap(memory, before);
    if (before < kHuge) munmap(memory + before + size, kHuge - before);
    madvise(memory + before, size, MADV_HUGEPAGE);  // a kernel without huge pages says no: no harm
    return memory + before;
}

void release(void *memory, size_t bytes) {
    if (memory != nullptr) munmap(memory, mapped(bytes));
}

#endif

}  // namespace astrai
