// What the stand-ins for the CUDA driver and for NCCL share: streams, and one lock for all that they know.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace machine {

// Whoever waits for something waits for `changed`, under `lock`.
extern std::mutex &lock;
extern std::condition_variable &changed;

using Job = std::function<void()>;

// A thread that does one job after the other.
struct Stream {
    explicit Stream(int device) : device(device) {}

    const int device;
    std::deque<Job> jobs;
    size_t n_put = 0, n_done = 0;
    bool ends = false;
};

// The device of the context that this thread has made its own, or -1.
int current_device();

// Behind what the stream has been given so far. The lock is not held.
void put(Stream *stream, Job job);

}  // namespace machine
