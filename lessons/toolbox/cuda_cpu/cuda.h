// CUDA C++ as a .cu file sees it, for a machine without a GPU: what each word means to one thread.
//
// A kernel is compiled as ordinary C++ against this header and runs once for each thread. The
// threads of a block are resumed one at a time (block.cpp), and the compiler reports each load and
// store to memory.cpp, because of its flag -fsanitize=thread. Nothing here knows of that.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>  // printf
#include <utility>

// ---------------------------------------------------------------- who am I

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

namespace cuda_cpu {
// "const", because they do not change as long as one thread runs: the compiler asks once.
__attribute__((const)) uint3 thread_index();
__attribute__((const)) uint3 block_index();
__attribute__((const)) uint3 block_size();
__attribute__((const)) uint3 grid_size();
__attribute__((const)) unsigned lane();
}  // namespace cuda_cpu

#define threadIdx (cuda_cpu::thread_index())
#define blockIdx (cuda_cpu::block_index())
#define blockDim (cuda_cpu::block_size())
#define gridDim (cuda_cpu::grid_size())
constexpr int warpSize = 32;

// ---------------------------------------------------------------- where code and data live

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ static
#define __align__(bytes) alignas(bytes)
// One copy for all threads. Blocks run one after another, so one copy serves every block in turn.
#define __shared__ static
// `extern __shared__ T name[];` as emulator.py rewrites it: the bytes that the launch asks for.
#define CUDA_CPU_DYNAMIC_SHARED(T, name) \
    static T* const name = reinterpret_cast<T*>(cuda_cpu::dynamic_shared)

// ---------------------------------------------------------------- meeting others

namespace cuda_cpu {
extern char dynamic_shared[];

// All threads of the block wait here for each other. line: of the .cu file.
void barrier(int line);
// What was written before is visible to other blocks.
void fence();
// All lanes of `mask` wait here for each other; each brings a value of 8 bytes and receives that of
// lane `source`, or with source BALLOT a bit for each lane, set where its value is not 0.
constexpr int BALLOT = -1;
uint64_t exchange(const char* what, unsigned mask, uint64_t mine, int source, int line);

template <typename T>
T receive(const char* what, unsigned mask, T mine, int source, int line) {
    static_assert(sizeof(T) <= 8, "a shuffle moves 4 or 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &mine, sizeof(T));
    bits = exchange(what, mask, bits, source, line);
    __builtin_memcpy(&mine, &bits, sizeof(T));
    return mine;
}
}  // namespace cuda_cpu

// __builtin_LINE() as a default argument is the line of the caller.
#define CALLED_AT int line = __builtin_LINE()

inline void __syncthreads(CALLED_AT) { cuda_cpu::barrier(line); }
inline void __threadfence() { cuda_cpu::fence(); }
inline void __threadfence_block() {}
inline void __syncwarp(unsigned mask = ~0u, CALLED_AT) {
    cuda_cpu::exchange("__syncwarp", mask, 0, cuda_cpu::BALLOT, line);
}
inline unsigned __ballot_sync(unsigned mask, int yes, CALLED_AT) {
    return cuda_cpu::exchange("__ballot_sync", mask, yes != 0, cuda_cpu::BALLOT, line);
}
inline int __any_sync(unsigned mask, int yes, CALLED_AT) {
    return cuda_cpu::exchange("__any_sync", mask, yes != 0, cuda_cpu::BALLOT, line) != 0;
}
inline int __all_sync(unsigned mask, int yes, CALLED_AT) {
    return cuda_cpu::exchange("__all_sync", mask, yes == 0, cuda_cpu::BALLOT, line) == 0;
}

// Shuffles. A warp is cut into segments of `width` lanes; a lane that would read beyond its own
// segment gets its own value back.
template <typename T>
T __shfl_sync(unsigned mask, T mine, int source, int width = 32, CALLED_AT) {
    int segment = cuda_cpu::lane() & ~(width - 1);
    int from = segment | (source & (width - 1));
    return cuda_cpu::receive("__shfl_sync", mask, mine, from, line);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T mine, int distance, int width = 32, CALLED_AT) {
    int lane = cuda_cpu::lane(), from = lane ^ distance, end = (lane & ~(width - 1)) + width;
    return cuda_cpu::receive("__shfl_xor_sync", mask, mine, from < end ? from : lane, line);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T mine, unsigned distance, int width = 32, CALLED_AT) {
    int lane = cuda_cpu::lane(), from = lane + distance, end = (lane & ~(width - 1)) + width;
    return cuda_cpu::receive("__shfl_down_sync", mask, mine, from < end ? from : lane, line);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T mine, unsigned distance, int width = 32, CALLED_AT) {
    int lane = cuda_cpu::lane(), from = lane - distance, segment = lane & ~(width - 1);
    return cuda_cpu::receive("__shfl_up_sync", mask, mine, from >= segment ? from : lane, line);
}

// ---------------------------------------------------------------- atomics

namespace cuda_cpu {
// Says that this thread is about to change *address in one step, and lets others run first.
void atomic(const void* address, unsigned bytes, int line);
template <typename T>
struct Same {
    using type = T;
};
template <typename T>
using same = typename Same<T>::type;  // so that atomicAdd(float*, 1) takes the 1 as a float
}  // namespace cuda_cpu

// The compiler need not report these loads and stores: `atomic` has done it.
#define UNWATCHED __attribute__((no_sanitize("thread")))

#define CUDA_CPU_ATOMIC(NAME, RESULT)                             \
    template <typename T>                                         \
    UNWATCHED T NAME(T* at, cuda_cpu::same<T> x, CALLED_AT) {     \
        cuda_cpu::atomic(at, sizeof(T), line);                    \
        T old = *at;                                              \
        *at = RESULT;                                             \
        return old;                                               \
    }
CUDA_CPU_ATOMIC(atomicAdd, old + x)
CUDA_CPU_ATOMIC(atomicSub, old - x)
CUDA_CPU_ATOMIC(atomicMax, old < x ? x : old)
CUDA_CPU_ATOMIC(atomicMin, x < old ? x : old)
CUDA_CPU_ATOMIC(atomicExch, x)
CUDA_CPU_ATOMIC(atomicAnd, old & x)
CUDA_CPU_ATOMIC(atomicOr, old | x)
template <typename T>
UNWATCHED T atomicCAS(T* at, cuda_cpu::same<T> expected, cuda_cpu::same<T> x, CALLED_AT) {
    cuda_cpu::atomic(at, sizeof(T), line);
    T old = *at;
    if (old == expected) *at = x;
    return old;
}

// ---------------------------------------------------------------- numbers

inline float __uint_as_float(unsigned bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline int __float_as_int(float x) { return __float_as_uint(x); }

// A GPU's quick versions are less exact than these.
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float max(float x, float y) { return fmaxf(x, y); }
inline float min(float x, float y) { return fminf(x, y); }
inline int max(int x, int y) { return x < y ? y : x; }
inline int min(int x, int y) { return y < x ? y : x; }
inline unsigned max(unsigned x, unsigned y) { return x < y ? y : x; }
inline unsigned min(unsigned x, unsigned y) { return y < x ? y : x; }
inline long long max(long long x, long long y) { return x < y ? y : x; }
inline long long min(long long x, long long y) { return y < x ? y : x; }
template <typename T>
T __ldg(const T* at) {
    return *at;
}

#include "cuda_types.h"

// ---------------------------------------------------------------- the launch

namespace cuda_cpu {
template <typename T>
constexpr char kind_of() {
    return std::is_pointer<T>::value ? 'p' : std::is_floating_point<T>::value ? 'f' : 'i';
}
// "p8 p8 i8 f4 ": a pointer of 8 bytes, ..., for emulator.py to hold the arguments against.
template <typename... T>
const char* parameters(void (*)(T...)) {
    static char text[4 * sizeof...(T) + 1];
    char* at = text;
    ((*at++ = kind_of<T>(), *at++ = '0' + sizeof(T), *at++ = ' '), ...);
    return text;
}
template <typename... T, std::size_t... I>
UNWATCHED void call(void (*kernel)(T...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<T*>(arguments[I])...);
}
template <typename... T>
void call(void (*kernel)(T...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<T...>{});
}
}  // namespace cuda_cpu

// What emulator.py puts behind the .cu file: one thread's run of the kernel, by addresses of its
// arguments.
#define CUDA_CPU_EXPORT extern "C" __attribute__((visibility("default")))
#define CUDA_CPU_KERNEL(NAME)                                                                \
    CUDA_CPU_EXPORT void cuda_cpu_body(void** arguments) { cuda_cpu::call(NAME, arguments); } \
    CUDA_CPU_EXPORT const char* cuda_cpu_parameters() { return cuda_cpu::parameters(NAME); }
