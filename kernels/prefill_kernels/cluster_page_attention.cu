// ID-aware union attention by a cluster of two CTAs (PageWeaver, Figure 3) for sm_90a: E4M3 pages, d = 128, page 128.
//
// A cluster computes one execution group of one KV head. CTA c owns slots 4 c .. 4 c + 3; a slot is a warp: 16 query
// heads of one query (heads beyond the real ones are padding), so that a CTA's four warps make the 64 rows of a
// warpgroup product. The same warps compute QK, softmax and PV and write the output; no partial result leaves a CTA.
//
// Each CTA has two slots of 32 KiB for pages: K [128, d] and V transposed [d, 128]. CTA 0 issues K and CTA 1 issues V
// of every page, multicast to both: the work of issuing is halved, and each issuer waits on a barrier of its own.
//   full[slot]   1 arrival and 32 KiB: set up by the CTA itself, filled by the halves of both.
//   empty[slot]  8 arrivals, the four warps of both CTAs: the page is read, the slot may be overwritten in both CTAs.
// A CTA without a member on a page computes nothing, but waits for the page and gives it back. Both walk the whole
// union, and neither leaves before the other has sent its last arrival.
//
// Bytes of a page are read by the tensor core alone. The rows of K lie in shared memory in the order in which the
// scores of a thread are the operand of the PV product, without an exchange between threads: row 16 h + 8 b + 2 c + e
// holds token 16 h + 4 c + 2 b + e. The tensor map does that: five dimensions (h, b, c, e, d).
//
// Softmax is per row, exact to the support: a warp whose query did not select the page (membership is a warp's, never a
// row's) leaves its maximum, sum and output untouched and spends no exponential on it.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int kThreads = 128;
constexpr int kDim = 128;
constexpr int kPage = 128;
constexpr int kSlots = 2;
constexpr int kHalfBytes = kPage * kDim;        // K, or V, of a page
constexpr int kSlotBytes = 2 * kHalfBytes;
constexpr int kQueryBytes = 64 * kDim;
constexpr int kBarriers = kQueryBytes + kSlots * kSlotBytes;
constexpr int kScales = kBarriers + 64;
constexpr int kSharedBytes = kScales + 64 * 4;
constexpr float kLog2Max = 8.807354922057604f;  // log2(448): weights are made at 448 times their value

struct Call {
    const void* q;
    void* out;
    const int* ids;        // [Hkv, G * 8]
    const int* positions;  // [N]
    const int* pages;      // [Hkv, G, width]
    const int* members;    // [Hkv, G, width]
    const int* counts;     // [Hkv, G]
    const int* requests;   // [G]
    const int* kv_lens;    // [R]
    const int* table;      // [R, table_stride]
    const float* k_scale;  // [Hkv]
    const float* v_scale;  // [Hkv]
    float scale;           // of the scores, times log2(e)
    int groups, width, table_stride, heads, kv_heads;  // heads: query heads a KV head
    long long q_head_stride, q_stride, out_head_stride, out_stride;
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool barrier_done(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    while (!barrier_done(barrier, parity)) {
    }
}

// Arrive at a barrier of one CTA of the cluster. No scope is named, as cluster-wide release and acquire would flush L1
// every page: what is handed over is a slot that the tensor core has finished reading and the copy engine will write.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t cta) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(cta)
        : "memory");
}

__device__ __forceinline__ void barrier_arrive_here(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

template <bool kMulticast>
__device__ __forceinline__ void load_keys(const CUtensorMap* map, uint32_t to, uint32_t barrier, int page, int column) {
    if constexpr (kMulticast) {
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%3, %4, %4, %4, %5}], [%2], %6;" ::"r"(to),
            "l"(map), "r"(barrier), "r"(column), "r"(0), "r"(page * 8), "h"(static_cast<uint16_t>(3))
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%3, %4, %4, %4, %5}], [%2];" ::"r"(to),
            "l"(map), "r"(barrier), "r"(column), "r"(0), "r"(page * 8)
            : "memory");
    }
}

template <bool kMulticast>
__device__ __forceinline__ void load_values(const CUtensorMap* map, uint32_t to, uint32_t barrier, int row) {
    if constexpr (kMulticast) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
            "l"(map), "r"(barrier), "r"(0), "r"(row), "h"(static_cast<uint16_t>(3))
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
            "l"(map), "r"(barrier), "r"(0), "r"(row)
            : "memory");
    }
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keep the compiler from moving accumulators while a product may still write them.
__device__ __forceinline__ void product_wait(float (&d)[64]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Operand of 128-byte rows under the 128-byte swizzle: eight rows are 1024 bytes.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
    constexpr uint64_t kSwizzle = uint64_t{1} << 62, kStride = uint64_t{1024 >> 4} << 32, kUnused = uint64_t{1} << 16;
    return kSwizzle | kStride | kUnused | ((address & 0x3FFFF) >> 4);
}

#define PW_REGISTERS(d)                                                                                              \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),       \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),        \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),       \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),       \
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),       \
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),       \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),       \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define PW_NAMES                                                                                                     \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// d = (kAdd ? d : 0) + a b: 64 rows of 32 E4M3 numbers in shared memory times 128 of 32.
template <int kAdd>
__device__ __forceinline__ void product(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " PW_NAMES ", %64, %65, p, 1, 1;\n}"
                 : PW_REGISTERS(d)
                 : "l"(a), "l"(b), "n"(kAdd));
}

// The same with the 64 rows in registers.
template <int kAdd>
__device__ __forceinline__ void product(float (&d)[64], const uint32_t* a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " PW_NAMES
                 ", {%64, %65, %66, %67}, %68, p, 1, 1;\n}"
                 : PW_REGISTERS(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd));
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
    uint32_t four;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(four)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return four;
}

__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ uint32_t narrow(float a, float b, __nv_bfloat16*) {
    __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<uint32_t*>(&two);
}
__device__ __forceinline__ uint32_t narrow(float a, float b, __half*) {
    __half2 two = __floats2half2_rn(a, b);
    return *reinterpret_cast<uint32_t*>(&two);
}

// max(x, least) that keeps NaN. Scores are far too close to 0 for the least factor to matter; masked ones are -inf, and
// times a factor that underflowed to 0 they would be NaN.
__device__ __forceinline__ float not_less(float x, float least) { return x < least ? least : x; }

// Quantise the 16 head rows of this warp's query into shared memory, E4M3 with one scale a row (amax / 448).
template <typename T>
__device__ __forceinline__ void load_queries(const Call& call, char* shared, int warp, int lane, int query, int head) {
    float* scales = reinterpret_cast<float*>(shared + kScales);
    const int part = lane & 15;
#pragma unroll
    for (int pass = 0; pass < 8; ++pass) {
        const int h = pass * 2 + (lane >> 4);
        const int row = warp * 16 + h;
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (query >= 0 && h < call.heads) {
            const T* from = static_cast<const T*>(call.q) + query * call.q_stride +
                            static_cast<long long>(head * call.heads + h) * call.q_head_stride + part * 8;
            raw = __ldg(reinterpret_cast<const uint4*>(from));
        }
        const T* numbers = reinterpret_cast<const T*>(&raw);
        float x[8], amax = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = widen(numbers[i]);
            amax = fmaxf(amax, fabsf(x[i]));
        }
#pragma unroll
        for (int step = 8; step >= 1; step >>= 1) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
        // The floor keeps the reciprocal finite, and the smallest bfloat16, 2^-133, is still a normal E4M3 number by it.
        const float scale = amax > 0.f ? fmaxf(amax / 448.f, 0x1p-127f) : 1.f;
        const float inverse = 1.f / scale;
        uint2 eight;
        eight.x = pack(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse);
        eight.y = pack(x[4] * inverse, x[5] * inverse, x[6] * inverse, x[7] * inverse);
        const int chunk = (part >> 1) ^ (row & 7);
        *reinterpret_cast<uint2*>(shared + row * kDim + chunk * 16 + (part & 1) * 8) = eight;
        if (part == 0) scales[row] = scale;
    }
}

template <bool kMulticast, typename T>
__device__ __forceinline__ void attend(const CUtensorMap* k_map, const CUtensorMap* v_map, const Call& call) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared);
    if (base & 1023) __trap();  // the swizzle needs it
    const int lane = threadIdx.x & 31;
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x >> 5), 0);
    const int cta = blockIdx.x & 1;  // rank in the cluster too
    const int pair = blockIdx.x >> 1;
    const int head = pair / call.groups;
    const int group = call.groups - 1 - pair % call.groups;  // late groups, which select the most, first
    const int line = head * call.groups + group;
    const int count = call.counts[line];
    const int request = call.requests[group];
    const int query = call.ids[line * 8 + cta * 4 + warp];
    // Offsets instead of pointers: registers are short.
    const uint32_t list = static_cast<uint32_t>(line) * call.width, lookup = request * call.table_stride;
    const uint32_t full = base + kBarriers, empty = full + 8 * kSlots;

    if (threadIdx.x == 0) {
        for (int s = 0; s < kSlots; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, kMulticast ? 8 : 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    // No page and no arrival may come before the barriers of both CTAs exist.
    if constexpr (kMulticast) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }

    // Thread 0: load page `next`, or this CTA's half of it for both CTAs, and read ahead where the one after it lies.
    int next = 0, page_of_next = 0;
    if (threadIdx.x == 0 && count > 0) page_of_next = call.table[lookup + call.pages[list]];
    auto load = [&]() {
        const int slot = next % kSlots, page = page_of_next;
        const uint32_t to = base + kQueryBytes + slot * kSlotBytes, ready = full + 8 * slot;
        if (++next < count) page_of_next = call.table[lookup + call.pages[list + next]];
        expect_bytes(ready, kSlotBytes);
        if (!kMulticast || cta == 0) load_keys<kMulticast>(k_map, to, ready, page, head * kDim);
        if (!kMulticast || cta == 1) {
            load_values<kMulticast>(v_map, to + kHalfBytes, ready, (page * call.kv_heads + head) * kDim);
        }
    };
    if (threadIdx.x == 0) {
        while (next < kSlots && next < count) load();
    }
    __syncwarp();
    // Page `next` may be loaded once page `next - kSlots`, which `step` is beyond, has been given back by all.
    auto refill = [&](int step, bool wait) {
        if (threadIdx.x == 0 && next < count && next < step + kSlots) {
            const uint32_t barrier = empty + 8 * (next % kSlots), parity = ((next - kSlots) / kSlots) & 1;
            if (wait) barrier_wait(barrier, parity);
            if (wait || barrier_done(barrier, parity)) load();
        }
        __syncwarp();
    };

    load_queries<T>(call, shared, warp, lane, query, head);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    // A thread holds rows lane / 4 and lane / 4 + 8 of its warp's 16, two neighbouring columns of every eight.
    const float* scales = reinterpret_cast<const float*>(shared + kScales);
    const float factor = call.scale * __ldg(call.k_scale + head);
    const int row = warp * 16 + (lane >> 2);
    const float scale0 = not_less(scales[row] * factor, 0x1p-126f);
    const float scale1 = not_less(scales[row + 8] * factor, 0x1p-126f);
    const int limit = min(query >= 0 ? call.positions[query] : 0, call.kv_lens[request] - 1);
    const uint64_t q_operand = operand(base);
    const float none = __int_as_float(0xff800000);
    float acc[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i] = 0.f;
    float max0 = none, max1 = none, sum0 = 0.f, sum1 = 0.f;

    int bits = count > 0 ? call.members[list] : 0, page = count > 0 ? call.pages[list] : 0;
    for (int step = 0; step < count; ++step) {
        const int slot = step % kSlots;
        const int mine = (bits >> (4 * cta)) & 15;
        const int first = page * kPage;
        if (step + 1 < count) {
            bits = call.members[list + step + 1];
            page = call.pages[list + step + 1];
        }
        // This step's page must be on its way before anyone waits for it: its slot was free a step ago or is now.
        refill(step, next <= step);
        barrier_wait(full + 8 * slot, (step / kSlots) & 1);
        if (mine) {
            const uint32_t at = base + kQueryBytes + slot * kSlotBytes;
            const uint64_t k_operand = operand(at), v_operand = operand(at + kHalfBytes);
            float s[64];
            product_fence();
            product<0>(s, q_operand, k_operand);
            product<1>(s, q_operand + 2, k_operand + 2);
            product<1>(s, q_operand + 4, k_operand + 4);
            product<1>(s, q_operand + 6, k_operand + 6);
            product_commit();
            refill(step, false);
            product_wait(s);

            uint32_t p[16];
            float decay0 = 1.f, decay1 = 1.f;
            const bool member = (mine >> warp) & 1;
            if (member) {
                if (first + kPage - 1 > limit) {
#pragma unroll
                    for (int i = 0; i < 64; ++i) {
                        // Column 8 j + 2 c + e with j = 2 h + b, e = i & 1; the bit above e is the row.
                        const int token = first + (i >> 3) * 16 + (lane & 3) * 4 + ((i >> 2) & 1) * 2 + (i & 1);
                        if (token > limit) s[i] = none;
                    }
                }
                float top0 = max0, top1 = max1;
#pragma unroll
                for (int i = 0; i < 64; i += 4) {
                    top0 = fmaxf(top0, fmaxf(s[i], s[i + 1]));
                    top1 = fmaxf(top1, fmaxf(s[i + 2], s[i + 3]));
                }
#pragma unroll
                for (int lanes = 1; lanes <= 2; lanes <<= 1) {
                    top0 = fmaxf(top0, __shfl_xor_sync(0xffffffffu, top0, lanes));
                    top1 = fmaxf(top1, __shfl_xor_sync(0xffffffffu, top1, lanes));
                }
                // A row without any token so far: -inf - -inf would poison it for ever.
                const float base0 = top0 == none ? 0.f : top0, base1 = top1 == none ? 0.f : top1;
                decay0 = exp2_fast((max0 - base0) * scale0);
                decay1 = exp2_fast((max1 - base1) * scale1);
                max0 = top0;
                max1 = top1;
                const float shift0 = base0 * scale0 - kLog2Max, shift1 = base1 * scale1 - kLog2Max;
                float part0 = 0.f, part1 = 0.f;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
#pragma unroll
                    for (int i = 8 * j; i < 8 * j + 8; i += 4) {
                        s[i] = exp2_fast(s[i] * scale0 - shift0);
                        s[i + 1] = exp2_fast(s[i + 1] * scale0 - shift0);
                        s[i + 2] = exp2_fast(s[i + 2] * scale1 - shift1);
                        s[i + 3] = exp2_fast(s[i + 3] * scale1 - shift1);
                        part0 += s[i] + s[i + 1];
                        part1 += s[i + 2] + s[i + 3];
                    }
                    // Tokens 4 c .. 4 c + 3 of 16 of both rows.
                    p[2 * j] = pack(s[8 * j], s[8 * j + 1], s[8 * j + 4], s[8 * j + 5]);
                    p[2 * j + 1] = pack(s[8 * j + 2], s[8 * j + 3], s[8 * j + 6], s[8 * j + 7]);
                }
                sum0 = sum0 * decay0 + part0;  // of this thread's columns; four threads share a row
                sum1 = sum1 * decay1 + part1;
            } else {
#pragma unroll
                for (int j = 0; j < 16; ++j) p[j] = 0;
            }
            __syncwarp();
            refill(step, false);

            // From zero, and added in float32: the tensor core keeps fewer bits of an FP8 product's accumulator.
            product_fence();
            product<0>(s, p, v_operand);
            product<1>(s, p + 4, v_operand + 2);
            product<1>(s, p + 8, v_operand + 4);
            product<1>(s, p + 12, v_operand + 6);
            product_commit();
            product_wait(s);
            if (lane == 0) {
                if constexpr (kMulticast) {
                    barrier_arrive(empty + 8 * slot, 0);
                    barrier_arrive(empty + 8 * slot, 1);
                } else {
                    barrier_arrive_here(empty + 8 * slot);
                }
            }
            __syncwarp();
            if (member) {
#pragma unroll
                for (int i = 0; i < 64; i += 4) {
                    acc[i] = acc[i] * decay0 + s[i];
                    acc[i + 1] = acc[i + 1] * decay0 + s[i + 1];
                    acc[i + 2] = acc[i + 2] * decay1 + s[i + 2];
                    acc[i + 3] = acc[i + 3] * decay1 + s[i + 3];
                }
            }
            __syncwarp();
        } else {
            if (lane == 0) {
                if constexpr (kMulticast) {
                    barrier_arrive(empty + 8 * slot, 0);
                    barrier_arrive(empty + 8 * slot, 1);
                } else {
                    barrier_arrive_here(empty + 8 * slot);
                }
            }
            __syncwarp();
        }
    }
    if constexpr (kMulticast) cluster_arrive();

#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes <<= 1) {
        sum0 += __shfl_xor_sync(0xffffffffu, sum0, lanes);
        sum1 += __shfl_xor_sync(0xffffffffu, sum1, lanes);
    }
    const float v_scale = __ldg(call.v_scale + head);
    const float inverse0 = sum0 == 0.f ? 0.f : v_scale / sum0, inverse1 = sum1 == 0.f ? 0.f : v_scale / sum1;
    if (query >= 0) {
        const int h0 = lane >> 2, h1 = h0 + 8;
        T* out = static_cast<T*>(call.out) + query * call.out_stride +
                 static_cast<long long>(head * call.heads) * call.out_head_stride + (lane & 3) * 2;
        T* out0 = out + h0 * call.out_head_stride;
        T* out1 = out + h1 * call.out_head_stride;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            if (h0 < call.heads) {
                *reinterpret_cast<uint32_t*>(out0 + 8 * j) =
                    narrow(acc[4 * j] * inverse0, acc[4 * j + 1] * inverse0, static_cast<T*>(nullptr));
            }
            if (h1 < call.heads) {
                *reinterpret_cast<uint32_t*>(out1 + 8 * j) =
                    narrow(acc[4 * j + 2] * inverse1, acc[4 * j + 3] * inverse1, static_cast<T*>(nullptr));
            }
        }
    }
    __syncwarp();
    // Arrivals of the other CTA may still be under way to this one's barriers.
    if constexpr (kMulticast) cluster_wait();
}

template <typename T>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 3)
    page_cluster(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                 const __grid_constant__ Call call) {
    attend<true, T>(&k_map, &v_map, call);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 3)
    page_single(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                const __grid_constant__ Call call) {
    attend<false, T>(&k_map, &v_map, call);
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode find_encode() {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
    cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
}

CUresult describe(Encode encode, CUtensorMap* map, const void* from, int rank, const cuuint64_t* shape,
                  const cuuint64_t* strides, const cuuint32_t* box) {
    const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, rank, const_cast<void*>(from), shape, strides, box, ones,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <typename T>
cudaError_t start(bool multicast, int blocks, const CUtensorMap& k_map, const CUtensorMap& v_map, const Call& call,
                  cudaStream_t stream) {
    auto kernel = multicast ? page_cluster<T> : page_single<T>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    kernel<<<blocks, kThreads, kSharedBytes, stream>>>(k_map, v_map, call);
    return cudaGetLastError();
}

}  // namespace

// 0, a cudaError_t, or 100000 plus a CUresult. `half` is 0 for bfloat16 and 1 for float16; strides count elements.
extern "C" int page_attention_launch(
    const void* k_pages, const void* vt_pages, long long physical_pages, const void* q, void* out, const int* ids,
    const int* positions, const int* pages, const int* members, const int* counts, const int* requests,
    const int* kv_lens, const int* table, const float* k_scale, const float* v_scale, float scale, int groups,
    int width, int table_stride, int heads, int kv_heads, long long q_head_stride, long long q_stride,
    long long out_head_stride, long long out_stride, int half, int multicast, void* stream) {
    static const Encode encode = find_encode();
    if (encode == nullptr) return static_cast<int>(cudaErrorSymbolNotFound);
    CUtensorMap k_map, v_map;
    const cuuint64_t row = static_cast<cuuint64_t>(kv_heads) * kDim;
    {
        // (d, e, c, b, h): token 16 h + 4 c + 2 b + e, in the order in which the kernel wants its rows.
        const cuuint64_t shape[5] = {row, 2, 4, 2, static_cast<cuuint64_t>(physical_pages) * 8};
        const cuuint64_t strides[4] = {row, 4 * row, 2 * row, 16 * row};
        const cuuint32_t box[5] = {kDim, 2, 4, 2, 8};
        if (CUresult r = describe(encode, &k_map, k_pages, 5, shape, strides, box)) return 100000 + r;
    }
    {
        const cuuint64_t shape[2] = {kPage, static_cast<cuuint64_t>(physical_pages) * row};
        const cuuint64_t strides[1] = {kPage};
        const cuuint32_t box[2] = {kPage, kDim};
        if (CUresult r = describe(encode, &v_map, vt_pages, 2, shape, strides, box)) return 100000 + r;
    }
    const Call call = {q,     out,     ids,     positions, pages,  members, counts,       requests, kv_lens,
                       table, k_scale, v_scale, scale,     groups, width,   table_stride, heads,    kv_heads,
                       q_head_stride, q_stride, out_head_stride, out_stride};
    const int blocks = 2 * groups * kv_heads;
    if (blocks == 0) return 0;
    const auto to = static_cast<cudaStream_t>(stream);
    return static_cast<int>(half ? start<__half>(multicast != 0, blocks, k_map, v_map, call, to)
                                 : start<__nv_bfloat16>(multicast != 0, blocks, k_map, v_map, call, to));
}

extern "C" const char* page_attention_error(int code) {
    return code >= 100000 ? "the tensor map was refused" : cudaGetErrorString(static_cast<cudaError_t>(code));
}
