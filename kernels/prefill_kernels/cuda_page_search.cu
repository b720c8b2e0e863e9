// Algorithm 1 and union preparation (PageWeaver) of one search window of one KV head in one CTA.
//
// A window has W queries of at most BITS selected pages; entry k of a query is its k-th id. Four threads a query
//   1. set bit i of masks[p] where query i selected page p. An atomic OR that finds its bit set is a repeated id, and
//      drops out: which of the repetitions stays changes no cost, so that the result does not depend on it;
//   2. write table[i], a row with one bit for every entry of every query j: whether query i selected that page too.
//      Rows are masks[page of each entry], transposed 32 x 32 bits at a time. Row i keeps the words of lane l at place
//      l ^ (i % 32), so that 32 rows of one column lie in 32 banks.
// Then the first warp searches. A lane holds `left`, the entries of its W / 32 queries that U does not cover; a pick i
// clears from it what table[i] says, and the cost |S_j \ U| is a population count. A pick is thus a chain of one load,
// one count and one reduction. Keys are (cost, byte offset of word 0 of the query's row), whose order is that of
// (cost, query).
// Last, one warp a group walks masks in ascending order of the pages: pages, members by execution slot, count. It enters
// the group in the queue of what attends next, in the bin of its count; the order within a bin is that of arrival.
//
// A request of more pages than the capacity keeps its order. Its pages may lie beyond the rows of masks, which are then
// filled again for the next stretch of pages.
//
// An order that is there already is not searched: masks are then of its execution slots in place of queries.

#include <cuda_runtime.h>
#include <stdint.h>

extern __shared__ uint4 page_search_memory[];

namespace {

constexpr int kGroup = 8;
constexpr uint32_t kWarp = 0xffffffffu;
constexpr int kOffsetBits = 18;  // of a row of the table, below the cost
constexpr uint32_t kOffset = (1u << kOffsetBits) - 1;
constexpr uint32_t kTaken = 1u << 31;  // above every cost
constexpr int kBins = 64;  // BINS of unions.py

struct Call {
    const int* pages;      // [N, Hkv, width] with strides
    const int* positions;  // [N]
    const int* kv_lens;    // [R]
    const int4* windows;   // first query, queries, first execution slot, request
    const int* order;      // [Hkv, groups * 8], the order to prepare, -1 in tail slots; null: search one
    int* ids;              // [Hkv, groups * 8]
    int* union_pages;      // [Hkv, groups, 8 * width]
    int* members;          // [Hkv, groups, 8 * width]
    int* counts;           // [Hkv, groups]
    int* sizes;            // [kBins], zeros before
    int* lines;            // [kBins, Hkv * groups]
    long long query_stride, head_stride;
    int page_size, capacity, rows, width, groups;  // rows: of masks, a multiple of 32
    int bin_shift, items;                          // a count's bin; Hkv * groups
};

template <int W, int BITS>
struct Layout {
    static constexpr int kThreads = 4 * W;
    static constexpr int kWarps = kThreads / 32;        // one for each group
    static constexpr int kWords = W / 32;               // of a mask over queries; also the queries of a lane
    static constexpr int kColumns = W * BITS / 32;      // words of a row of the table
    static constexpr int kTurns = kColumns / kWarps;    // columns that a warp makes
    static constexpr int kShare = kColumns / 32;        // words of a row that a lane of the search reads
    static constexpr int kRowBytes = 4 * kColumns;
    static constexpr int kHalves = BITS == 64 ? 2 : 1;  // words of a query's entries
    static_assert(kWarps == W / kGroup && W * kRowBytes <= kOffset + 1);
    static_assert(kWarps * kGroup * BITS <= W * kColumns, "the lists of the groups take the place of the table");

    static size_t bytes(int rows) { return 4 * (W * kColumns + static_cast<size_t>(rows) * kWords + kColumns + W); }

    // Of the words of a lane in a row, in bytes.
    __device__ static uint32_t offset(int row, int lane) { return row * kRowBytes + (lane ^ row % 32) * kShare * 4; }
};

template <int N>
__device__ __forceinline__ void read(uint32_t (&to)[N], const void* from) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
            const uint4 x = static_cast<const uint4*>(from)[i];
            to[4 * i] = x.x, to[4 * i + 1] = x.y, to[4 * i + 2] = x.z, to[4 * i + 3] = x.w;
        }
    } else if constexpr (N == 2) {
        const uint2 x = *static_cast<const uint2*>(from);
        to[0] = x.x, to[1] = x.y;
    } else {
        to[0] = *static_cast<const uint32_t*>(from);
    }
}

// Bit b of lane l becomes bit l of lane b, of each word: in five steps, the halves of ever smaller squares change places.
template <int N>
__device__ __forceinline__ void transpose(uint32_t (&x)[N], int lane) {
    constexpr uint32_t kLow[5] = {0x0000ffffu, 0x00ff00ffu, 0x0f0f0f0fu, 0x33333333u, 0x55555555u};
#pragma unroll
    for (int step = 0; step < 5; ++step) {
        const int half = 16 >> step;
        const bool upper = lane & half;
        const uint32_t keep = upper ? ~kLow[step] : kLow[step];
        const uint32_t turn = upper ? 32 - half : half;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const uint32_t other = __shfl_xor_sync(kWarp, x[i], half);
            x[i] = (x[i] & keep) | (__funnelshift_l(other, other, turn) & ~keep);
        }
    }
}

// Mark the entries on pages tile .. tile + rows - 1 in the cleared masks; `sizes` gets a bit for each that is no
// repetition.
template <int W, int BITS>
__device__ __forceinline__ void mark(const int (&page)[Layout<W, BITS>::kTurns], int tile, int rows, uint32_t* masks,
                                     uint32_t* sizes, int warp, int lane) {
    using L = Layout<W, BITS>;
#pragma unroll
    for (int n = 0; n < L::kTurns; ++n) {
        const int column = warp * L::kTurns + n, query = (column * 32 + lane) / BITS;
        const uint32_t at = page[n] - tile, bit = 1u << (query & 31);
        const bool fresh = at < rows && !(atomicOr(masks + at * L::kWords + query / 32, bit) & bit);
        const uint32_t size = __ballot_sync(kWarp, fresh);
        if (lane == 0) sizes[column] = size;
    }
}

__device__ __forceinline__ void clear(uint32_t* masks, int words, int thread, int threads) {
    for (int i = thread; i < words / 4; i += threads) reinterpret_cast<uint4*>(masks)[i] = make_uint4(0, 0, 0, 0);
}

// Numbers of the rows of the queries in execution order. Slots after the last query get any row.
template <int W, int BITS>
__device__ __forceinline__ void search(const uint32_t* table, const uint32_t* sizes, uint32_t* order, int count,
                                       int lane) {
    using L = Layout<W, BITS>;
    constexpr int kWords = L::kWords, kHalves = L::kHalves;
    uint32_t words[L::kShare], size[kWords][kHalves], row[kWords];
    read(words, sizes + lane * L::kShare);
    const char* const rows = reinterpret_cast<const char*>(table);
    const uint32_t own = L::offset(0, lane);
#pragma unroll
    for (int q = 0; q < kWords; ++q) {
        const int place = lane * kWords + q;
        row[q] = L::offset(place, 0) | (place < count ? 0 : kTaken);
#pragma unroll
        for (int i = 0; i < kHalves; ++i) {
            size[q][i] = BITS == 16 ? words[q / 2] & (q % 2 ? 0xffff0000u : 0x0000ffffu) : words[kHalves * q + i];
        }
    }
    for (int start = 0; start < count; start += kGroup) {
        uint32_t left[kWords][kHalves], key[kWords], picks[kGroup];
#pragma unroll
        for (int q = 0; q < kWords; ++q) {
            key[q] = row[q];  // the seed is the lowest remaining id
#pragma unroll
            for (int i = 0; i < kHalves; ++i) left[q][i] = size[q][i];
        }
#pragma unroll
        for (int member = 0; member < kGroup; ++member) {
            uint32_t best = key[0];
#pragma unroll
            for (int q = 1; q < kWords; ++q) best = min(best, key[q]);
            const uint32_t found = __reduce_min_sync(kWarp, best), pick = found & kOffset;
            picks[member] = pick / L::kRowBytes;
#pragma unroll
            for (int q = 0; q < kWords; ++q) {
                const uint32_t taken = row[q] == pick ? kTaken : 0;
                row[q] |= taken;
            }
            if (member + 1 < kGroup) {
                uint32_t covered[L::kShare];
                read(covered, rows + ((found & (W * L::kRowBytes - 1)) ^ own));  // one instruction, as pick ^ own is not
#pragma unroll
                for (int q = 0; q < kWords; ++q) {
                    uint32_t cost = 0;
#pragma unroll
                    for (int i = 0; i < kHalves; ++i) {
                        left[q][i] &= ~covered[BITS == 16 ? q / 2 : kHalves * q + i];
                        cost += __popc(left[q][i]);
                    }
                    key[q] = row[q] + (cost << kOffsetBits);
                }
            }
        }
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < kGroup; i += 4) {
                *reinterpret_cast<uint4*>(order + start + i) = make_uint4(picks[i], picks[i + 1], picks[i + 2], picks[i + 3]);
            }
        }
    }
}

template <int W, int BITS>
__global__ void __launch_bounds__(4 * W) page_search(const Call call) {
    using L = Layout<W, BITS>;
    uint32_t* const table = reinterpret_cast<uint32_t*>(page_search_memory);
    uint32_t* const masks = table + W * L::kColumns;
    uint32_t* const sizes = masks + call.rows * L::kWords;
    uint32_t* const order = sizes + L::kColumns;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, head = blockIdx.y;

    const int4 window = call.windows[blockIdx.x];
    const int first = window.x, slot = window.z;
    const int length = call.kv_lens[window.w];
    const long long slots = static_cast<long long>(head) * call.groups * kGroup + slot;
    const int* const given = call.order ? call.order + slots : nullptr;
    const int count = given ? (window.y + kGroup - 1) / kGroup * kGroup : window.y;
    clear(masks, call.rows * L::kWords, thread, L::kThreads);
    if (thread < W) order[thread] = thread;

    // Tokens beyond the causal position and beyond the request leave their pages before costs are computed.
    int page[L::kTurns];
#pragma unroll
    for (int n = 0; n < L::kTurns; ++n) {
        const int entry = (warp * L::kTurns + n) * 32 + lane, query = entry / BITS, k = entry % BITS;
        page[n] = -1;
        const int from = query >= count || k >= call.width ? -1 : given ? given[query] : first + query;
        if (from >= 0) {
            const long long at = from * call.query_stride + head * call.head_stride + k;
            const int chosen = call.pages[at], last = min(call.positions[from], length - 1);
            if (chosen >= 0 && static_cast<long long>(chosen) * call.page_size <= last) page[n] = chosen;
        }
    }
    const int held = length > 0 ? (length - 1) / call.page_size + 1 : 0;
    __syncthreads();
    mark<W, BITS>(page, 0, call.rows, masks, sizes, warp, lane);
    __syncthreads();

    if (!given && held <= call.capacity) {
#pragma unroll
        for (int n = 0; n < L::kTurns; ++n) {
            uint32_t queries[L::kWords] = {};
            if (static_cast<uint32_t>(page[n]) < call.rows) read(queries, masks + page[n] * L::kWords);
            transpose(queries, lane);
            const int column = warp * L::kTurns + n;
            uint32_t* const to = table + L::offset(lane, column / L::kShare) / 4 + column % L::kShare;
#pragma unroll
            for (int i = 0; i < L::kWords; ++i) to[32 * i * L::kColumns] = queries[i];
        }
        __syncthreads();
        if (warp == 0) search<W, BITS>(table, sizes, order, count, lane);
        __syncthreads();
    }

    if (!given && thread < (count + kGroup - 1) / kGroup * kGroup) {
        call.ids[slots + thread] = thread < count ? first + static_cast<int>(order[thread]) : -1;
    }

    // The warp's group: its queries by slot, and all of them as a mask.
    const int queries = max(0, min(kGroup, count - warp * kGroup));
    const int place = order[warp * kGroup + lane % kGroup];
    uint32_t group[L::kWords];
#pragma unroll
    for (int i = 0; i < L::kWords; ++i) {
        group[i] = __reduce_or_sync(kWarp, lane < queries && place / 32 == i ? 1u << (place % 32) : 0);
    }
    int places[kGroup];
#pragma unroll
    for (int r = 0; r < kGroup; ++r) places[r] = __shfl_sync(kWarp, place, r);

    const long long item = static_cast<long long>(head) * call.groups + slot / kGroup + warp;
    int* const union_pages = call.union_pages + item * kGroup * call.width;
    int* const members = call.members + item * kGroup * call.width;
    uint32_t* const list = table + warp * kGroup * BITS;
    int found = 0;
    for (int tile = 0; tile < held; tile += call.rows) {
        if (tile) {
            __syncthreads();
            clear(masks, call.rows * L::kWords, thread, L::kThreads);
            __syncthreads();
            mark<W, BITS>(page, tile, call.rows, masks, sizes, warp, lane);
            __syncthreads();
        }
        const int before = found, end = queries ? min(call.rows, held - tile) : 0;
#pragma unroll 4
        for (int begin = 0; begin < end; begin += 32) {
            uint32_t chosen[L::kWords], any = 0;
            read(chosen, masks + (begin + lane) * L::kWords);
#pragma unroll
            for (int i = 0; i < L::kWords; ++i) any |= chosen[i] & group[i];
            const uint32_t held_here = __ballot_sync(kWarp, any != 0);
            if (any) list[found + __popc(held_here & ((1u << lane) - 1))] = begin + lane;
            found += __popc(held_here);
        }
        __syncwarp();
        for (int n = before + lane; n < found; n += 32) {
            const uint32_t at = list[n];
            uint32_t bits = 0;
#pragma unroll
            for (int r = 0; r < kGroup; ++r) {
                bits |= (masks[at * L::kWords + places[r] / 32] >> (places[r] % 32) & 1) << r;
            }
            union_pages[n] = tile + static_cast<int>(at);
            members[n] = bits & ((1 << queries) - 1);
        }
    }
    if (queries == 0) return;
    if (lane == 0) {
        const int bin = max(0, kBins - 1 - (found >> call.bin_shift));
        const int at = atomicAdd(call.sizes + bin, 1);
        call.lines[static_cast<long long>(bin) * call.items + at] = static_cast<int>(item);
        call.counts[item] = found;
    }
    for (int n = found + lane; n < kGroup * call.width; n += 32) union_pages[n] = -1, members[n] = 0;
}

template <int W, int BITS>
cudaError_t start(const Call& call, int windows, int heads, cudaStream_t stream) {
    using L = Layout<W, BITS>;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3(windows, heads);
    launch.blockDim = dim3(L::kThreads);
    launch.dynamicSmemBytes = L::bytes(call.rows);
    launch.stream = stream;
    const cudaError_t error =
        cudaFuncSetAttribute(page_search<W, BITS>, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.dynamicSmemBytes);
    return error == cudaSuccess ? cudaLaunchKernelEx(&launch, page_search<W, BITS>, call) : error;
}

}  // namespace

// 0 or a cudaError_t. `window` is 64 or 128, `width` at most 64; strides count elements. Of `order` and `ids` one is null.
extern "C" int page_search_launch(const int* pages, const int* positions, const int* kv_lens, const void* windows,
                                  const int* order, int* ids, int* union_pages, int* members, int* counts,
                                  int* sizes, int* lines, long long query_stride, long long head_stride, int page_size,
                                  int capacity, int rows, int width, int groups, int bin_shift, int window,
                                  int window_count, int heads, void* stream) {
    const Call call = {pages,  positions,    kv_lens,     static_cast<const int4*>(windows),
                       order,  ids,          union_pages, members,
                       counts, sizes,        lines,       query_stride,
                       head_stride, page_size, capacity,  rows,
                       width,  groups,       bin_shift,   heads * groups};
    const auto run = window == 64 ? width <= 16   ? start<64, 16>
                                    : width <= 32 ? start<64, 32>
                                                  : start<64, 64>
                     : width <= 16 ? start<128, 16>
                     : width <= 32 ? start<128, 32>
                                   : start<128, 64>;
    return static_cast<int>(run(call, window_count, heads, static_cast<cudaStream_t>(stream)));
}

// What a launch on the current device would meet at the latest: another architecture, a driver older than the runtime.
extern "C" int page_search_problem() {
    cudaFuncAttributes found;
    return static_cast<int>(cudaFuncGetAttributes(&found, page_search<64, 16>));
}

extern "C" const char* page_search_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
