// Each load and store of the kernel arrives here before it happens, because the compiler puts a
// call before it (-fsanitize=thread; the functions have the names of ThreadSanitizer's, whose
// library is not linked). Found are accesses outside of every tensor and variable, data races, and
// shared memory that is read before it is written.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "emulator.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// The first byte of the library that holds the kernel and us; the linker defines it.
extern "C" const char __ehdr_start __attribute__((visibility("hidden")));

namespace cuda_cpu {

alignas(256) char dynamic_shared[228 << 10];

namespace {
std::vector<Memory> memories;  // of this launch, by address
Memory* latest = nullptr;      // where the access before was: the next one is often there too

const char* verb(Access how) {
    return how == READ ? "reads" : how == WRITE ? "writes" : "atomically changes";
}

// "64 bytes behind the end of k_tile": what lies nearest to an address outside of everything.
std::string nearest(uintptr_t address) {
    const Memory* best = nullptr;
    uintptr_t best_distance = ~uintptr_t(0);
    for (auto& m : memories) {
        uintptr_t distance = address < m.begin ? m.begin - address : address - m.end;
        if (distance < best_distance) best = &m, best_distance = distance;
    }
    if (!best || best_distance > 1 << 20) return "at an address in no tensor";
    bool before = address < best->begin;
    const char* side = before ? " bytes before the start of " : " bytes behind the end of ";
    return std::to_string(best_distance) + side + best->name;
}

Memory& memory_at(uintptr_t address, size_t bytes, Access how, Place place) {
    auto holds = [&](const Memory& m) { return m.begin <= address && address + bytes <= m.end; };
    if (latest && holds(*latest)) return *latest;
    auto behind = std::upper_bound(memories.begin(), memories.end(), address,
                                   [](uintptr_t a, const Memory& m) { return a < m.begin; });
    if (behind != memories.begin() && holds(behind[-1])) return *(latest = &behind[-1]);
    fail(*current, place, "out of bounds", "%s %zu bytes, %s", verb(how), bytes,
         nearest(address).c_str());
}

// ---------------------------------------------------------------- races

// Whether what `mark` did comes before what the current thread does now, in every order that a GPU
// may choose.
bool comes_before(const Mark& mark, const Memory& memory) {
    if (mark.time < last_barrier && mark.block == block_number) return true;
    if (mark.block != block_number)  // blocks are ordered by nothing but a __threadfence
        return memory.kind == SHARED || mark.time == 0 || mark.time < last_fence;
    if (mark.thread == current->number) return true;
    bool same_warp = mark.thread / LANES == current->number / LANES;
    return same_warp && mark.time < current->synced[mark.thread % LANES];
}

[[noreturn]] void fail_race(const Memory& memory, size_t offset, Access how, Place place,
                            const Mark& mark, const char* did) {
    std::string who = tuple(index_in(mark.thread, block_size()));
    if (mark.block != block_number) who += " of block " + tuple(index_in(mark.block, grid_size()));
    fail(*current, place, "data race",
         "%s byte %zu of %s; thread %s %s it at @%x, with no barrier between", verb(how), offset,
         memory.name.c_str(), who.c_str(), did, mark.place);
}

void watch(Cell& cell, const Memory& memory, size_t offset, Access how, Place place) {
    bool both_atomic = how == ATOMIC && cell.atomic;
    const char* did = cell.atomic ? "atomically changed" : "wrote";
    if (!both_atomic && !comes_before(cell.write, memory))
        fail_race(memory, offset, how, place, cell.write, did);
    Mark mine = {now, block_number, current->number, place};
    if (how == READ) {
        if (memory.kind == SHARED && cell.write.time < block_start)
            fail(*current, place, "uninitialised",
                 "reads byte %zu of %s, which no thread has written", offset, memory.name.c_str());
        bool same_thread = cell.read.thread == mine.thread && cell.read.block == mine.block;
        if (!same_thread) cell.other_read = cell.read;
        cell.read = mine;
        return;
    }
    for (const Mark& read : {cell.read, cell.other_read})
        if (!comes_before(read, memory)) fail_race(memory, offset, how, place, read, "reads");
    cell.write = mine;
    cell.atomic = how == ATOMIC;
}

Place place_of(const void* return_address) {
    // - 1, because the call's own line is wanted and not that of what follows
    return Place(uintptr_t(return_address) - 1 - uintptr_t(&__ehdr_start));
}
}  // namespace

void Memory::split_cells(size_t bytes) {
    std::vector<Cell> smaller((end - begin + bytes - 1) / bytes);
    if (!cells.empty())
        for (size_t i = 0; i < smaller.size(); i++) smaller[i] = cells[i * bytes / cell_bytes];
    cells = std::move(smaller);
    cell_bytes = bytes;
}

void access(const void* pointer, size_t bytes, Access how, Place place) {
    if (!current) return;  // the library is being loaded
    auto address = reinterpret_cast<uintptr_t>(pointer);
    auto stack = reinterpret_cast<uintptr_t>(current->stack);
    if (stack <= address && address < stack + STACK_BYTES) return;  // a variable of its own
    Memory& memory = memory_at(address, bytes, how, place);
    if (memory.kind == CONSTANT) return;
    if (counting) count(memory, address, bytes, how, place);
    size_t offset = address - memory.begin, unit = (offset | bytes) & -(offset | bytes);
    // the largest power of two that divides both: one cell must not hold what two threads own
    if (memory.cells.empty() || unit < memory.cell_bytes)
        memory.split_cells(std::min(unit, memory.cell_bytes));
    size_t last = (offset + bytes - 1) / memory.cell_bytes;
    for (size_t i = offset / memory.cell_bytes; i <= last; i++)
        watch(memory.cells[i], memory, offset, how, place);
    static unsigned accesses = 0;
    constexpr unsigned TURN = 1 << 16;  // so that a loop that waits for another thread lets it run
    if (how != ATOMIC && ++accesses % TURN == 0) give_way(TURN);
}

void atomic(const void* address, unsigned bytes, int line) {
    give_way(64);
    access(address, bytes, ATOMIC, at_line(line));
}

void poison_shared_memory() {
    for (auto& m : memories)  // all bits 1: NaN as a float of any size, and -1
        if (m.kind == SHARED) memset(reinterpret_cast<void*>(m.begin), 0xff, m.end - m.begin);
}

EXPORT void cuda_cpu_forget_memory() {
    memories.clear();
    latest = nullptr;
}

// Say that a kernel may use [begin, begin + bytes). In the order of addresses.
EXPORT void cuda_cpu_add_memory(const char* name, uintptr_t begin, size_t bytes, int kind) {
    memories.push_back({name, begin, begin + bytes, Kind(kind), 16, {}});
}

EXPORT uintptr_t cuda_cpu_dynamic_shared() { return reinterpret_cast<uintptr_t>(dynamic_shared); }

// ---------------------------------------------------------------- what the compiler calls

#define HERE place_of(__builtin_return_address(0))
#define WATCH(BYTES)                                                                            \
    extern "C" void __tsan_read##BYTES(void* at) { access(at, BYTES, READ, HERE); }             \
    extern "C" void __tsan_write##BYTES(void* at) { access(at, BYTES, WRITE, HERE); }           \
    extern "C" void __tsan_unaligned_read##BYTES(void* at) { access(at, BYTES, READ, HERE); }   \
    extern "C" void __tsan_unaligned_write##BYTES(void* at) { access(at, BYTES, WRITE, HERE); }
WATCH(1)
WATCH(2)
WATCH(4)
WATCH(8)
WATCH(16)
extern "C" void __tsan_read_range(void* at, size_t bytes) { access(at, bytes, READ, HERE); }
extern "C" void __tsan_write_range(void* at, size_t bytes) { access(at, bytes, WRITE, HERE); }
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
    access(from, bytes, READ, HERE);
    access(to, bytes, WRITE, HERE);
    return memcpy(to, from, bytes);
}
extern "C" void* __tsan_memmove(void* to, const void* from, size_t bytes) {
    access(from, bytes, READ, HERE);
    access(to, bytes, WRITE, HERE);
    return memmove(to, from, bytes);
}
extern "C" void* __tsan_memset(void* to, int value, size_t bytes) {
    access(to, bytes, WRITE, HERE);
    return memset(to, value, bytes);
}

// -fsanitize=bounds,alignment,integer-divide-by-zero: an index beyond its array's type, a pointer
// that is no multiple of what it points to, a division that would end Python. The compiler hands
// over where it stands: a file's name, the line, the column.
struct Source {
    const char* file;
    unsigned line, column;
};
extern "C" void __ubsan_handle_out_of_bounds(Source* source, uintptr_t index) {
    if (current)
        fail(*current, at_line(source->line), "out of bounds",
             "uses index %ld of an array that ends before", long(index));
}
extern "C" void __ubsan_handle_divrem_overflow(Source* source, uintptr_t, uintptr_t) {
    if (current) fail(*current, at_line(source->line), "division", "divides a whole number by 0");
}
extern "C" void __ubsan_handle_type_mismatch_v1(Source* source, uintptr_t pointer) {
    if (current)
        fail(*current, at_line(source->line), "misaligned",
             "uses an address that ends in hex %02lx, no multiple of what it loads or stores",
             long(pointer & 0xff));
}

}  // namespace cuda_cpu
