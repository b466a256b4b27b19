// Zeroed memory in huge pages where the kernel has some: weights are read from end to end, and small pages cost lookups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace astrai {

// Page-aligned and zeroed; throws std::bad_alloc.
void *allocate(size_t bytes);
void release(void *memory, size_t bytes);

// One block of memory that grows and is never shrunk.
class Buffer {
  public:
    Buffer() = default;
    ~Buffer() { release(memory_, bytes_); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    // Zeroed whenever it grows; what was there is gone then.
    void reserve(size_t bytes) {
        if (bytes <= bytes_) return;
        release(std::exchange(memory_, nullptr), std::exchange(bytes_, 0));
        memory_ = allocate(bytes);
        bytes_ = bytes;
    }
    size_t bytes() const { return bytes_; }
    template <class T> T *as() const { return static_cast<T *>(memory_); }

  private:
    void *memory_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace astrai
