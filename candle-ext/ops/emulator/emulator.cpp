// Runs a grid of fibers. See emulator.h.
#include "emulator.h"

#include <link.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
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
    std::unique_ptr<char[]> stack;
};

// Linear congruential generator; the upper bits are used.
struct Random {
    uint64_t state;

    // A number below n, which is at most 2^31.
    unsigned below(uint64_t n) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (state >> 33) * n >> 31;
    }
};

// The library's thread-local variables of this thread: those below, and the static shared memory of all its kernels.
struct ThreadLocals {
    char* data;
    size_t n;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<uint64_t> lanes;
    // Lanes of each warp that have arrived at a warp-wide instruction.
    std::vector<unsigned> n_arrived;
    std::vector<char> shared;
    ThreadLocals thread_locals;
    Random random;
    // The reason why the launch ends, if it fails.
    std::string failure;
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

ThreadLocals find_thread_locals() {
    // Reading the address allocates the variables of a new thread.
    struct Search {
        const char* address;
        ThreadLocals found;
    } search{reinterpret_cast<const char*>(&blockIdx), {}};
    dl_iterate_phdr(
        [](dl_phdr_info* library, size_t, void* data) {
            Search& search = *static_cast<Search*>(data);
            const auto start = static_cast<char*>(library->dlpi_tls_data);
            for (int i = 0; start && i < library->dlpi_phnum; ++i) {
                const auto& header = library->dlpi_phdr[i];
                if (header.p_type != PT_TLS || search.address < start || search.address >= start + header.p_memsz) continue;
                search.found = {start, header.p_memsz};
                return 1;
            }
            return 0;
        },
        &search);
    return search.found;
}

// Fills shared memory with NaN: another block's values could be the right ones by chance.
void clear_shared(size_t n) {
    const auto saved = std::make_tuple(blockIdx, blockDim, gridDim, block);
    const ThreadLocals thread_locals = block->thread_locals;
    std::fill_n(thread_locals.data, thread_locals.n, static_cast<char>(0xff));
    std::tie(blockIdx, blockDim, gridDim, block) = saved;
    std::fill_n(shared_begin(), n, static_cast<char>(0xff));
    std::fill_n(shared_begin() + n, GUARD_BYTES, GUARD);
}

bool is_guard_intact(size_t n) {
    const char* guard = shared_begin() + n;
    return std::all_of(guard, guard + GUARD_BYTES, [](char byte) { return byte == GUARD; });
}

std::string place_of_block() {
    const auto [x, y, z] = blockIdx;
    return "block (" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}

// Ends the launch; called by a fiber.
[[noreturn]] void fail(const std::string& why) {
    block->failure = place_of_block() + ", thread " + std::to_string(threadIdx.x) + ": " + why;
    wait(State::Gone);
    __builtin_unreachable();
}

// Runs the warp of this first thread until each of its threads waits for the block or has ended. Between two waits its
// lanes run in a random order.
void run_warp(unsigned first) {
    std::array<unsigned char, 32> lanes;
    std::iota(lanes.begin(), lanes.end(), 0);
    do {
        for (unsigned i = 31; i > 0; --i) std::swap(lanes[i], lanes[block->random.below(i + 1)]);
        for (unsigned lane : lanes) {
            const unsigned i = first + lane;
            if (block->fibers[i].state != State::Ready) continue;
            block->current = i;
            threadIdx = {i, 0, 0};
            resume(block->fibers[i]);
            if (!block->failure.empty()) return;
        }
    } while (release(first, first + 32, State::WaitsForWarp));
}

void prepare(Fiber& fiber) {
    fiber.state = State::Ready;
    fiber.has_begun = fiber.is_odd = false;
    fiber.copies.clear();
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, body, 0);
}

bool have_all_ended() {
    return std::all_of(block->fibers.begin(), block->fibers.end(),
                       [](const Fiber& fiber) { return fiber.state == State::Gone; });
}

// Runs the block until it ends or fails. Each warp runs as far as it can before the next one starts; the order is reversed
// after each __syncthreads.
void run_block(unsigned shared_bytes) {
    const unsigned n = block->fibers.size(), n_warps = n / 32;
    clear_shared(shared_bytes);
    std::fill(block->n_arrived.begin(), block->n_arrived.end(), 0);
    for (Fiber& fiber : block->fibers) prepare(fiber);
    bool is_reversed = false;
    do {
        for (unsigned i = 0; i < n_warps; ++i) {
            run_warp(32 * (is_reversed ? n_warps - 1 - i : i));
            if (!block->failure.empty()) return;
        }
        is_reversed = !is_reversed;
    } while (release(0, n, State::WaitsForBlock));
    if (!have_all_ended()) block->failure = place_of_block() + ": its threads deadlock";
    else if (!is_guard_intact(shared_bytes)) block->failure = place_of_block() + ": a write past the end of dynamic shared memory";
}

// Source position and alignment, as the compiler's sanitizer passes them (GCC and Clang).
struct MisalignedAccess {
    const char* file;
    uint32_t line, column;
    const void* type;
    unsigned char log_alignment, kind;
};

}  // namespace

void __syncthreads() { wait(State::WaitsForBlock); }
void __syncwarp(unsigned) { wait(State::WaitsForWarp); }

char* emulated_shared() { return shared_begin(); }
std::vector<Copy>& emulated_copies() { return block->fibers[block->current].copies; }

void emulated_check(bool holds, const char* otherwise) {
    if (!holds) fail(otherwise);
}

uint64_t* emulated_lanes() {
    bool& is_odd = block->fibers[block->current].is_odd;
    is_odd = !is_odd;
    return &block->lanes[(threadIdx.x / 32 * 2 + is_odd) * 32];
}

bool emulated_is_last() {
    unsigned& n = block->n_arrived[threadIdx.x / 32];
    n = (n + 1) % 32;
    return n == 0;
}

// The alignment sanitizer calls it, instead of its runtime library's function of this name.
extern "C" [[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(const MisalignedAccess* access, uintptr_t address) {
    const unsigned alignment = 1u << access->log_alignment;
    fail(std::string(access->file) + ":" + std::to_string(access->line) + ": an access to an address that is " +
         std::to_string(address % alignment) + " bytes past a multiple of " + std::to_string(alignment));
}

// Runs the kernel with an order of blocks and lanes that the seed draws. Returns false after a failure, whose reason it writes
// to `failure`.
extern "C" __attribute__((visibility("default"))) bool emulate(void (*kernel)(const uint64_t*), const uint64_t* arguments,
                                                               const unsigned grid[3], unsigned threads,
                                                               unsigned shared_bytes, uint64_t seed, char* failure,
                                                               size_t failure_bytes) {
    Block own;
    own.fibers.resize(threads);
    own.lanes.resize(threads * 2);
    own.n_arrived.resize(threads / 32);
    own.shared.resize(shared_bytes + GUARD_BYTES + 128);
    own.thread_locals = find_thread_locals();
    own.random = {seed};
    own.kernel = kernel;
    own.arguments = arguments;
    for (Fiber& fiber : own.fibers) fiber.stack.reset(new char[STACK_BYTES]);
    block = &own;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads, 1, 1};
    // From a random block on, forward or backward.
    const uint64_t n_blocks = uint64_t(grid[0]) * grid[1] * grid[2];
    const uint64_t step = own.random.below(2) ? 1 : n_blocks - 1;
    uint64_t at = own.random.below(std::min<uint64_t>(n_blocks, 1u << 31));
    for (uint64_t i = 0; i < n_blocks && own.failure.empty(); ++i, at = (at + step) % n_blocks) {
        blockIdx = {unsigned(at % grid[0]), unsigned(at / grid[0] % grid[1]), unsigned(at / grid[0] / grid[1])};
        run_block(shared_bytes);
    }
    std::snprintf(failure, failure_bytes, "%s", own.failure.c_str());
    return own.failure.empty();
}
