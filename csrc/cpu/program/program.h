// A decoder that is ready to run, whatever instruction set it was compiled for.
#pragma once

#include <cstdint>

#include "include/astrai_cpu.h"

namespace astrai {

class Program {
  public:
    virtual ~Program() = default;
    Program() = default;
    Program(const Program &) = delete;
    Program &operator=(const Program &) = delete;

    // One step. Throws std::invalid_argument for what the caller got wrong, before anything is written.
    virtual void run(const astrai_step &) = 0;
    virtual int64_t bytes() const = 0;
    virtual void profile(double *seconds) = 0;
};

}  // namespace astrai
