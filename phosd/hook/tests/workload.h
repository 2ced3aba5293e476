// Work for a gate to close on: threads that repeat a step, and kernels that wait for each other.
#pragma once

#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "check.h"

namespace phos::test {

constexpr uint32_t kDeadline = 4000;  // milliseconds

extern CUcontext context;
extern CUfunction wait_for;   // spins until a value in memory is at least the one given
extern CUfunction set_value;  // writes it

// Loads the driver, makes a context current, and loads the kernels above.
void start_workload();
void launch(CUfunction function, CUstream stream, CUdeviceptr flag, unsigned value);

// A thread of the program that repeats one step until it is told to stop.
class Worker {
  public:
    template <class Step>
    explicit Worker(Step step)
        : thread_([this, step]() mutable {
              OK(cuCtxSetCurrent(context));
              while (!stop_) {
                  step(++steps);
                  ++done;
              }
          }) {}
    ~Worker() {
        stop_ = true;
        thread_.join();
    }
    void more(uint64_t count) {
        const uint64_t goal = done + count;
        for (int i = 0; done < goal; ++i) {
            CHECK(i < 20000);
            usleep(1000);
        }
    }
    std::atomic<uint64_t> done{0};
    unsigned steps = 0;

  private:
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

// Closes the gate at random instants; each time it closes, or gives up in time, and the program
// goes on. How often it closed.
int close_often(Client& client, int times, bool park, std::vector<Worker*> workers);

}  // namespace phos::test
