// What the emulator's three parts share: block.cpp runs threads, memory.cpp watches loads and
// stores, counts.cpp counts sectors and bank conflicts. The .cu file sees nothing of it.
#pragma once
#include <setjmp.h>

#include <cstddef>
#include <string>
#include <vector>

#include "cuda.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace cuda_cpu {

constexpr unsigned LANES = 32;

// Where in the .cu file: the offset of an instruction in the library, or a line number with the
// highest bit set. emulator.py finds the line of an offset.
using Place = unsigned;
constexpr Place LINE = 1u << 31;
inline Place at_line(int line) { return LINE | unsigned(line); }

enum State { READY, AT_BARRIER, AT_EXCHANGE, DONE };

struct Thread {
    unsigned number;  // in its block; 32 successive ones are a warp
    uint3 index;
    bool started;
    State state;
    jmp_buf registers;  // while others run
    char* stack;
    int line;  // where it waits
    // the exchange that it waits in
    const char* what;
    unsigned mask;
    uint64_t given, received;
    int source;
    unsigned synced[LANES];  // when it last met each lane of its warp in __syncwarp
};

extern std::vector<Thread> threads;  // of the block that runs
extern Thread* current;              // the thread that runs; null outside of a launch
extern unsigned block_number;

// Time advances by one wherever threads meet.
extern unsigned now, block_start, last_barrier, last_fence;
constexpr unsigned STACK_BYTES = 128 << 10;

// End the launch with a message: "@place: kind: block (0, 0, 0), thread (1, 0, 0) ...".
[[noreturn]] void fail(const Thread& thread, Place place, const char* kind, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
std::string tuple(uint3 index);
uint3 index_in(unsigned number, uint3 size);
// Let other threads run; fails if no thread has met another for `effort` too often.
void give_way(unsigned effort);

// ---------------------------------------------------------------- memory.cpp

enum Access { READ, WRITE, ATOMIC };
enum Kind { GLOBAL, SHARED, CONSTANT };

// When and where a thread touched something. All 0: nobody did.
struct Mark {
    unsigned time, block, thread;
    Place place;
};

// The last write and the last reads, of two different threads, of a few bytes.
struct Cell {
    Mark write, read, other_read;
    bool atomic;  // the write was
};

// One tensor, or one variable of the .cu file.
struct Memory {
    std::string name;
    uintptr_t begin, end;
    Kind kind;
    size_t cell_bytes;  // 16; shrinks to the smallest access
    std::vector<Cell> cells;

    void split_cells(size_t bytes);
};

void access(const void* address, size_t bytes, Access how, Place place);
void poison_shared_memory();

// ---------------------------------------------------------------- counts.cpp

extern bool counting;  // whether this launch is counted
void count(const Memory& memory, uintptr_t address, size_t bytes, Access how, Place place);
void count_end_of_block();

}  // namespace cuda_cpu
