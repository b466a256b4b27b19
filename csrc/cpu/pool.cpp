// Waiting: spin, because a step has a hundred barriers a few microseconds apart; then a futex, because a thread that spins
// against somebody else's work takes the core from the very thread that it waits for.
#include "pool.h"

#include <algorithm>
#include <chrono>
#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace astrai {

namespace {

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t> &word, uint32_t seen) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    if (word.load(std::memory_order_acquire) == seen) std::this_thread::yield();
#endif
}

void wake_all(std::atomic<uint32_t> &word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

}  // namespace

void Signal::advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all(value_);
}

void Signal::wait_while(uint32_t seen, int64_t spin_ns) {
    using Clock = std::chrono::steady_clock;
    for (int i = 0; i < 64; i++) {  // most waits end here, without a look at the clock
        if (value() != seen) return;
        relax();
    }
    const auto until = Clock::now() + std::chrono::nanoseconds(spin_ns);
    do {
        for (int i = 0; i < 32; i++) {
            if (value() != seen) return;
            relax();
        }
    } while (Clock::now() < until);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value() == seen) sleep_while(value_, seen);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

Pool::Pool(int threads, int spin_us) : n_threads_(std::max(threads, 1)), spin_ns_(int64_t(std::max(spin_us, 0)) * 1000) {
    try {
        for (int worker = 1; worker < n_threads_; worker++) workers_.emplace_back([this, worker] { live(worker); });
    } catch (...) {  // the system has no more threads: those that began must end before the error may leave
        stop();
        throw;
    }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
    stopping_.store(true, std::memory_order_release);
    started_.advance();
    for (std::thread &worker : workers_) worker.join();
}

void Pool::live(int worker) {
    for (uint32_t seen = 0;; seen++) {
        started_.wait_while(seen, spin_ns_);
        if (stopping_.load(std::memory_order_acquire)) return;
        call_(work_, worker);
        if (working_.fetch_sub(1, std::memory_order_acq_rel) == 1) finished_.advance();
    }
}

void Pool::run_erased(Erased call, void *work) {
    call_ = call, work_ = work;
    if (n_threads_ > 1) {
        const uint32_t before = finished_.value();
        working_.store(n_threads_ - 1, std::memory_order_relaxed);
        started_.advance();
        call(work, 0);
        finished_.wait_while(before, spin_ns_);
    } else {
        call(work, 0);
    }
}

void Pool::barrier() {
    if (n_threads_ == 1) return;
    const uint32_t before = met_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == n_threads_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        met_.advance();
    } else {
        met_.wait_while(before, spin_ns_);
    }
}

Pool::Runs::Runs(int lists, int workers) : workers_(workers), stretches_(new Stretch[size_t(lists) * size_t(workers)]) {}

Pool::Runs::~Runs() { delete[] stretches_; }

void Pool::Runs::open(int list, int n, int unit) {
    const int64_t units = (n + unit - 1) / unit;
    for (int64_t worker = 0; worker < workers_; worker++) {
        Stretch &stretch = stretches_[size_t(list) * size_t(workers_) + size_t(worker)];
        stretch.next.store(int(units * worker / workers_) * unit, std::memory_order_relaxed);
        stretch.end = worker + 1 < workers_ ? int(units * (worker + 1) / workers_) * unit : n;
    }
}

}  // namespace astrai
