// Runs a grid of fibers. See emulator.h.
#include "emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr size_t STACK_BYTES = 64 << 10;

// Guard bytes after dynamic shared memory, which reveal writes past its end.
constexpr size_t GUARD_BYTES = 256;
constexpr char GUARD = 0x5a;

enum class State { Ready, WaitsForBlock, WaitsForWarp, Gone };

struct Fiber {
    // Entry context; later waits resume by setjmp, which makes no system call, where swapcontext makes two.
    ucontext_t start;
    jmp_buf place;
    bool has_begun;
    State state;
    // Which of two slots its next exchange uses: a lane cannot be two exchanges ahead of another.
    bool is_odd;
    std::vector<Copy> copies;
    std::vector<char> stack;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<uint64_t> lanes;
    std::vector<char> shared;
    ucontext_t beginning;
    jmp_buf scheduler;
    unsigned current;
    void (*kernel)(const uint64_t*);
    const uint64_t* arguments;
};

thread_local Block* block;

void wait(State state) {
    Fiber& self = block->fibers[block->current];
    self.state = state;
    if (_setjmp(self.place) == 0) _longjmp(block->scheduler, 1);
}

// Runs a fiber until it waits.
void resume(Fiber& fiber) {
    if (_setjmp(block->scheduler) != 0) return;
    if (fiber.has_begun) _longjmp(fiber.place, 1);
    fiber.has_begun = true;
    swapcontext(&block->beginning, &fiber.start);
}

void body() {
    block->kernel(block->arguments);
    wait(State::Gone);
}

// Resumes the fibers [first, last) if all of them have arrived.
bool release(unsigned first, unsigned last, State from) {
    bool any = false;
    for (unsigned i = first; i < last; ++i) {
        const State state = block->fibers[i].state;
        if (state != from && state != State::Gone) return false;
        any |= state == from;
    }
    for (unsigned i = first; i < last && any; ++i) {
        if (block->fibers[i].state == from) block->fibers[i].state = State::Ready;
    }
    return any;
}

// Start of dynamic shared memory, aligned to 128 bytes, without the guard.
char* shared_begin() {
    const auto address = reinterpret_cast<uintptr_t>(block->shared.data());
    return block->shared.data() + (128 - address % 128) % 128;
}

void clear_shared(size_t n) {
    std::fill_n(shared_begin(), n, static_cast<char>(0xff));
    std::fill_n(shared_begin() + n, GUARD_BYTES, GUARD);
}

void check_shared(size_t n) {
    for (size_t i = 0; i < GUARD_BYTES; ++i) {
        emulated_check(shared_begin()[n + i] == GUARD, "a write past the end of dynamic shared memory");
    }
}

// Runs the warp of this first thread until each of its threads waits for the block or has ended.
void run_warp(unsigned first) {
    const unsigned last = std::min<unsigned>(first + 32, block->fibers.size());
    do {
        for (unsigned i = first; i < last; ++i) {
            if (block->fibers[i].state != State::Ready) continue;
            block->current = i;
            threadIdx = {i, 0, 0};
            resume(block->fibers[i]);
        }
    } while (release(first, last, State::WaitsForWarp));
}

void prepare(Fiber& fiber) {
    fiber.state = State::Ready;
    fiber.has_begun = fiber.is_odd = false;
    fiber.copies.clear();
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = fiber.stack.size();
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, body, 0);
}

// Runs the block; false on a deadlock. Each warp runs as far as it can before the next one starts; the order is
// reversed after each __syncthreads.
bool run_block() {
    const unsigned n = block->fibers.size(), n_warps = (n + 31) / 32;
    for (Fiber& fiber : block->fibers) prepare(fiber);
    for (bool is_reversed = false;; is_reversed = !is_reversed) {
        for (unsigned i = 0; i < n_warps; ++i) run_warp(32 * (is_reversed ? n_warps - 1 - i : i));
        if (release(0, n, State::WaitsForBlock)) continue;
        return std::all_of(block->fibers.begin(), block->fibers.end(),
                           [](const Fiber& fiber) { return fiber.state == State::Gone; });
    }
}

}  // namespace

void __syncthreads() { wait(State::WaitsForBlock); }
void __syncwarp(unsigned) { wait(State::WaitsForWarp); }

char* emulated_shared() { return shared_begin(); }
std::vector<Copy>& emulated_copies() { return block->fibers[block->current].copies; }

void emulated_check(bool holds, const char* otherwise) {
    if (holds) return;
    std::fprintf(stderr, "emulated kernel, block (%u, %u, %u), thread %u: %s\n", blockIdx.x, blockIdx.y, blockIdx.z,
                 threadIdx.x, otherwise);
    std::abort();
}

uint64_t* emulated_lanes() {
    bool& is_odd = block->fibers[block->current].is_odd;
    is_odd = !is_odd;
    return &block->lanes[(threadIdx.x / 32 * 2 + is_odd) * 32];
}

extern "C" __attribute__((visibility("default"))) bool emulate(void (*kernel)(const uint64_t*),
                                                               const uint64_t* arguments, const unsigned grid[3],
                                                               unsigned threads, unsigned shared_bytes) {
    Block own;
    own.fibers.resize(threads);
    own.lanes.resize((threads + 31) / 32 * 64);
    own.shared.resize(shared_bytes + GUARD_BYTES + 128);
    own.kernel = kernel;
    own.arguments = arguments;
    for (Fiber& fiber : own.fibers) fiber.stack.resize(STACK_BYTES);
    block = &own;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads, 1, 1};
    for (unsigned z = 0; z < grid[2]; ++z) {
        for (unsigned y = 0; y < grid[1]; ++y) {
            for (unsigned x = 0; x < grid[0]; ++x) {
                blockIdx = {x, y, z};
                clear_shared(shared_bytes);
                if (!run_block()) return false;
                check_shared(shared_bytes);
            }
        }
    }
    return true;
}
