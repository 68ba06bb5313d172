// Common state of the stand-ins for the CUDA driver and NCCL: streams, and one lock for everything.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace machine {

// All waits use `changed` with `lock`.
extern std::mutex &lock;
extern std::condition_variable &changed;

using Job = std::function<void()>;

// Stream: a thread that runs jobs in order.
struct Stream {
    explicit Stream(int device) : device(device) {}

    const int device;
    std::deque<Job> jobs;
    size_t n_put = 0, n_done = 0;
    bool ends = false;
};

// Returns the device of this thread's current context, or -1.
int current_device();

// Appends a job to the stream. The caller must not hold the lock.
void put(Stream *stream, Job job);

}  // namespace machine
