// A few threads that run one function together and meet at barriers: waiting is a short spin, then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace astrai {

// A counter that threads wait on. Waiting spins for a while, then sleeps in the kernel until it has moved on.
class Signal {
  public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }
    void advance();
    void wait_while(uint32_t seen, int64_t spin_ns);

  private:
    std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> sleepers_{0};
};

// The caller of `run` is worker 0; the others live as long as the pool. One `run` at a time.
class Pool {
  public:
    Pool(int threads, int spin_us);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int threads() const { return n_threads_; }

    // Calls work(worker) on every worker and returns when all have come back.
    template <class Work> void run(Work &work) {
        run_erased([](void *w, int worker) { (*static_cast<Work *>(w))(worker); }, &work);
    }

    // Inside `run`: waits until every worker has called it.
    void barrier();

    // Inside `run`: hands out 0..n-1 in pieces, each to one worker; call `open` once for each use, between two barriers.
    class Claims {
      public:
        void open(int n) { n_ = n, next_.store(0, std::memory_order_relaxed); }
        // The first of `size` items (fewer at the end, see `last`), or -1 when all are taken.
        int take(int size) {
            if (next_.load(std::memory_order_relaxed) >= n_) return -1;
            int first = next_.fetch_add(size, std::memory_order_relaxed);
            return first < n_ ? first : -1;
        }
        int last(int first, int size) const { return first + size < n_ ? first + size : n_; }

      private:
        alignas(64) std::atomic<int> next_{0};
        int n_ = 0;
    };

    // Lists of work whose neighbours lie side by side in memory. Each worker walks through a stretch of its own, and who is
    // done takes from what others have left, so that nobody waits long for a worker that has lost its core.
    class Runs {
      public:
        struct Run {
            int first, last;
            explicit operator bool() const { return first < last; }
        };

        Runs(int lists, int workers);
        ~Runs();
        Runs(const Runs &) = delete;
        Runs &operator=(const Runs &) = delete;

        // The list becomes 0..n-1; stretches begin at multiples of `unit`. Once for each use, between two barriers.
        void open(int list, int n, int unit);

        // At most `size` neighbours, none when all are taken.
        Run take(int list, int worker, int size) {
            for (int i = 0; i < workers_; i++) {
                Stretch &stretch = stretches_[size_t(list) * size_t(workers_) + size_t((worker + i) % workers_)];
                if (stretch.next.load(std::memory_order_relaxed) >= stretch.end) continue;
                const int first = stretch.next.fetch_add(size, std::memory_order_relaxed);
                if (first < stretch.end) return {first, first + size < stretch.end ? first + size : stretch.end};
            }
            return {0, 0};
        }

      private:
        struct alignas(64) Stretch {
            std::atomic<int> next{0};
            int end = 0;
        };
        const int workers_;
        Stretch *const stretches_;
    };

  private:
    using Erased = void (*)(void *, int);
    void run_erased(Erased call, void *work);
    void live(int worker);
    void stop();

    const int n_threads_;
    const int64_t spin_ns_;
    Erased call_ = nullptr;
    void *work_ = nullptr;
    std::atomic<bool> stopping_{false};
    alignas(64) Signal started_;
    alignas(64) Signal finished_;
    alignas(64) Signal met_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> working_{0};
    std::vector<std::thread> workers_;
};

}  // namespace astrai
