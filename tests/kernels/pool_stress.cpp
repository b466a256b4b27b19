// Runs the pool until a race would show: many short runs with barriers and claims, from several callers one after another.
// Usage: pool_stress THREADS SPIN_US RUNS; exits with 0 when every sum is right, with 3 when the system has no more threads.
// Compiled with -fsanitize=thread by the tests.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <system_error>
#include <thread>
#include <vector>

#include "pool.h"

namespace {

// One run: fill, barrier, sum what the others filled, barrier, count claimed items. Plain memory on purpose: the barriers
// alone order it, and the sanitizer says so when they do not.
bool one_run(astrai::Pool &pool, int number) {
    constexpr int kItems = 257;
    const int threads = pool.threads();
    std::vector<int> filled(size_t(threads), -1), sums(size_t(threads), 0), claimed(kItems, 0);
    astrai::Pool::Claims claims, again;
    claims.open(kItems);
    auto work = [&](int worker) {
        for (int round = 0; round < 3; round++) {
            filled[size_t(worker)] = number + round + worker;
            pool.barrier();
            int sum = 0;
            for (int value : filled) sum += value;
            sums[size_t(worker)] += sum;
            pool.barrier();
        }
        for (int first; (first = claims.take(8)) >= 0;) {
            for (int i = first; i < claims.last(first, 8); i++) claimed[size_t(i)]++;
        }
        pool.barrier();
        if (worker == 0) again.open(kItems);
        pool.barrier();
        for (int first; (first = again.take(3)) >= 0;) {
            for (int i = first; i < again.last(first, 3); i++) claimed[size_t(i)]++;
        }
    };
    pool.run(work);
    int expected = 0;
    for (int round = 0; round < 3; round++) {
        for (int worker = 0; worker < threads; worker++) expected += number + round + worker;
    }
    for (int sum : sums) {
        if (sum != expected) return std::printf("run %d: a sum of %d, not %d\n", number, sum, expected), false;
    }
    for (int count : claimed) {
        if (count != 2) return std::printf("run %d: an item was taken %d times\n", number, count), false;
    }
    return true;
}

}  // namespace

int main(int argc, char **argv) try {
    if (argc != 4) return std::printf("pool_stress THREADS SPIN_US RUNS\n"), 2;
    const int threads = std::atoi(argv[1]), spin_us = std::atoi(argv[2]), runs = std::atoi(argv[3]);
    for (int life = 0; life < 4; life++) {  // pools that are opened, used and closed, also without a single run
        astrai::Pool pool(threads, spin_us);
        bool right = true;
        std::thread caller([&] {  // not always the same thread calls
            for (int number = 0; number < life * runs / 6 && right; number++) right = one_run(pool, number);
        });
        caller.join();
        for (int number = 0; number < life * runs / 6 && right; number++) {
            right = one_run(pool, number);
            if (number % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));  // lets workers fall asleep
        }
        if (!right) return 1;
    }
    return 0;
} catch (const std::system_error &error) {
    std::printf("%s\n", error.what());
    return 3;
}
