// The scheduler of the fibers, see cuda_runtime.h. SHARED_MEMORY names the array that the kernel declares.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda_runtime.h"

alignas(1024) uint4 SHARED_MEMORY[kSharedBytes / sizeof(uint4) + 256];
dim3 blockIdx;

namespace emulator {
namespace {

constexpr size_t kStack = 1 << 16;
constexpr int kJunk = 0xa5;

struct Gate {  // a count of the rounds that all have passed
    uint64_t round = 0;
    unsigned came = 0;
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
    const uint64_t* gate;  // it waits until this differs from `round`
    uint64_t round;
};
struct Warp {
    Gate gate;
    uint32_t words[2][32];  // of this round and of the one before
};

std::vector<Fiber> fibers;
ucontext_t scheduler;
Warp warps[32];
Gate block;
void (*body_)(void*);
void* argument_;

void wait(Gate& gate, unsigned all) {
    const uint64_t round = gate.round;
    if (++gate.came == all) {
        gate.came = 0, ++gate.round;
        return;
    }
    while (gate.round == round) {
        fibers[thread].gate = &gate.round, fibers[thread].round = round;
        swapcontext(&fibers[thread].context, &scheduler);
    }
}

void begin() {
    body_(argument_);
    fibers[thread].done = true;
    swapcontext(&fibers[thread].context, &scheduler);
}

void stop(const char* why) {
    std::fprintf(stderr, "cuda_emulator: block (%u, %u): %s\n", blockIdx.x, blockIdx.y, why);
    std::abort();
}

}  // namespace

unsigned thread;

const uint32_t* warp(uint32_t x) {
    Warp& mine = warps[thread / 32];
    uint32_t* words = mine.words[mine.gate.round % 2];
    words[thread % 32] = x;
    wait(mine.gate, 32);
    return words;
}

void barrier() { wait(block, static_cast<unsigned>(fibers.size())); }

void launch(dim3 grid, unsigned threads, size_t shared, void (*body)(void*), void* argument) {
    body_ = body, argument_ = argument;
    fibers.resize(threads);
    for (unsigned index = 0; index < grid.x * grid.y; ++index) {
        blockIdx = {index % grid.x, index / grid.x};
        std::memset(SHARED_MEMORY, kJunk, sizeof SHARED_MEMORY);
        block = {};
        for (Warp& one : warps) one.gate = {};
        for (Fiber& one : fibers) {
            one.stack.resize(kStack), one.done = false, one.gate = nullptr;
            getcontext(&one.context);
            one.context.uc_stack = {.ss_sp = one.stack.data(), .ss_flags = 0, .ss_size = kStack};
            one.context.uc_link = &scheduler;
            makecontext(&one.context, begin, 0);
        }
        // Blocks take turns in running their threads forwards and backwards.
        for (unsigned left = threads, ran = 1; left; ran || (stop("threads wait for one another"), 0)) {
            ran = 0;
            for (unsigned i = 0; i < threads; ++i) {
                thread = index % 2 ? threads - 1 - i : i;
                Fiber& one = fibers[thread];
                if (one.done || (one.gate && *one.gate == one.round)) continue;
                one.gate = nullptr, ++ran;
                swapcontext(&scheduler, &one.context);
                left -= one.done;
            }
        }
        const auto* bytes = reinterpret_cast<const unsigned char*>(SHARED_MEMORY);
        for (size_t at = shared; at < sizeof SHARED_MEMORY; ++at) {
            if (bytes[at] != kJunk) stop("a write beyond its shared memory");
        }
    }
}

}  // namespace emulator
