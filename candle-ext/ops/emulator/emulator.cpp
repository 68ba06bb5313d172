// Runs a grid of fibers. See emulator.h.
#include "emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <vector>

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr size_t STACK_BYTES = 64 << 10;

enum class State { Ready, WaitsForBlock, WaitsForWarp, Gone };

struct Fiber {
    // Where it begins; from its first wait on, where it goes on. setjmp makes no system call, swapcontext two.
    ucontext_t start;
    jmp_buf place;
    bool has_begun;
    State state;
    // Which of two places its next exchange uses: a lane cannot be two exchanges ahead of another.
    bool is_odd;
    std::vector<char> stack;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<uint64_t> lanes;
    ucontext_t beginning;
    jmp_buf scheduler;
    unsigned current;
    void (*kernel)(void*);
    void* arguments;
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

// Lets the fibers [first, last) go on if none of them has to come yet.
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

// Runs the block; false if its threads wait for each other for ever.
bool run_block() {
    const unsigned n = block->fibers.size();
    for (Fiber& fiber : block->fibers) {
        fiber.state = State::Ready;
        fiber.has_begun = fiber.is_odd = false;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.data();
        fiber.start.uc_stack.ss_size = fiber.stack.size();
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, body, 0);
    }
    for (;;) {
        bool moved = false, all_gone = true;
        for (unsigned i = 0; i < n; ++i) {
            if (block->fibers[i].state == State::Ready) {
                block->current = i;
                threadIdx = {i, 0, 0};
                resume(block->fibers[i]);
                moved = true;
            }
            all_gone &= block->fibers[i].state == State::Gone;
        }
        if (all_gone) return true;
        for (unsigned first = 0; first < n; first += 32) {
            moved |= release(first, first + 32 < n ? first + 32 : n, State::WaitsForWarp);
        }
        moved |= release(0, n, State::WaitsForBlock);
        if (!moved) return false;
    }
}

}  // namespace

void __syncthreads() { wait(State::WaitsForBlock); }
void __syncwarp(unsigned) { wait(State::WaitsForWarp); }

uint64_t* emulated_lanes() {
    bool& is_odd = block->fibers[block->current].is_odd;
    is_odd = !is_odd;
    return &block->lanes[(threadIdx.x / 32 * 2 + is_odd) * 32];
}

extern "C" __attribute__((visibility("default"))) bool emulate(void (*kernel)(void*), void* arguments, const unsigned grid[3], unsigned threads) {
    Block own;
    own.fibers.resize(threads);
    own.lanes.resize((threads + 31) / 32 * 64);
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
                if (!run_block()) return false;
            }
        }
    }
    return true;
}
