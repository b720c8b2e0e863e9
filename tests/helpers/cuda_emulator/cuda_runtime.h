// Enough of CUDA to run page_search on a CPU: a block at a time, a fiber for each thread, barriers and warp collectives
// as switches between fibers. Shared memory holds junk at first; a write beyond what was asked for, or a barrier that not
// all reach, aborts. Data races between two barriers are not seen: fibers run one after another.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(threads)

using std::max;
using std::min;

struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct dim3 { unsigned x, y; dim3(unsigned x = 1, unsigned y = 1) : x(x), y(y) {} };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

using cudaError_t = int;
using cudaStream_t = void*;
struct cudaFuncAttributes {};
struct cudaLaunchConfig_t { dim3 gridDim, blockDim; size_t dynamicSmemBytes; cudaStream_t stream; };
constexpr int cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
constexpr size_t kSharedBytes = 232448;  // of a block of sm_90

namespace emulator {
extern unsigned thread;           // that runs
const uint32_t* warp(uint32_t x); // the words of the warp's lanes, when all of them have come
void barrier();
void launch(dim3 grid, unsigned threads, size_t shared, void (*body)(void*), void* argument);
}  // namespace emulator

extern dim3 blockIdx;
struct ThreadIndex { struct { operator int() const { return static_cast<int>(emulator::thread); } } x; };
static ThreadIndex threadIdx;

inline void __syncthreads() { emulator::barrier(); }
inline void __syncwarp() { emulator::warp(0); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t x, int lanes) { return emulator::warp(x)[emulator::thread % 32 ^ lanes]; }
inline int __shfl_sync(uint32_t, int x, int lane) { return static_cast<int>(emulator::warp(x)[lane]); }
inline uint32_t __ballot_sync(uint32_t, bool x) {
    const uint32_t* all = emulator::warp(x);
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= all[lane] << lane;
    return bits;
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t x) { const uint32_t* all = emulator::warp(x); return *std::min_element(all, all + 32); }
inline uint32_t __reduce_or_sync(uint32_t, uint32_t x) {
    const uint32_t* all = emulator::warp(x);
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= all[lane];
    return bits;
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t by) {
    return by % 32 ? high << by % 32 | low >> (32 - by % 32) : high;
}
inline int atomicAdd(int* at, int more) { const int old = *at; *at += more; return old; }
inline uint32_t atomicOr(uint32_t* at, uint32_t bits) { const uint32_t old = *at; *at |= bits; return old; }

template <class Kernel> cudaError_t cudaFuncSetAttribute(Kernel, int, size_t bytes) {
    return bytes > kSharedBytes ? cudaErrorInvalidValue : cudaSuccess;
}
template <class Kernel> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "more shared memory than a block has"; }
template <class Kernel, class Call> cudaError_t cudaLaunchKernelEx(cudaLaunchConfig_t* at, Kernel kernel, const Call& call) {
    struct Bound { Kernel kernel; const Call* call; } bound{kernel, &call};
    emulator::launch(at->gridDim, at->blockDim.x, at->dynamicSmemBytes,
                     [](void* x) { static_cast<Bound*>(x)->kernel(*static_cast<Bound*>(x)->call); }, &bound);
    return cudaSuccess;
}
