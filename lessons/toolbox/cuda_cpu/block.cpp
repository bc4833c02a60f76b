// A block's threads as fibers of one CPU thread: each has a stack of its own and runs until it has
// to wait. Which one goes on is drawn from a seed, so that a kernel which relies on an order fails.
#include <ucontext.h>

#include <cstdarg>
#include <cstdio>
#include <memory>
#include <set>

#include "emulator.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace cuda_cpu {

std::vector<Thread> threads;
Thread* current = nullptr;
unsigned block_number, now, block_start, last_barrier, last_fence;

namespace {
uint3 grid, block, block_at;
jmp_buf scheduler, launch_end;
std::vector<unsigned> ready;  // numbers of the threads that may run
std::string error;
uint64_t random_state;
uint64_t effort_since_meeting;
constexpr uint64_t PATIENCE = 1ull << 28;  // accesses: a second or two
void (*body)(void**);
void** arguments;

unsigned random_below(unsigned n) {  // xorshift64*, Vigna 2016
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return unsigned((random_state * 0x2545F4914F6CDD1Dull) >> 33) % n;
}

// ---------------------------------------------------------------- switching

// Leave the current thread until the scheduler picks it again. (swapcontext would do the same and
// ask the operating system each time, which takes most of a kernel's run.)
void leave() {
    if (!_setjmp(current->registers)) _longjmp(scheduler, 1);
}

void wake(Thread& thread) {
    thread.state = READY;
    ready.push_back(thread.number);
}

void life_of_a_thread() {
    body(arguments);
    current->state = DONE;
    effort_since_meeting = 0;
    leave();
}

void start(Thread& thread) {  // first call of a thread: on a stack of its own
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = thread.stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, life_of_a_thread, 0);
    setcontext(&context);
}

// ---------------------------------------------------------------- meeting

// "threads 0-31, 40": of the block, those that `belongs` says.
template <typename Belongs>
std::string named(Belongs belongs) {
    std::string text;
    for (unsigned first = 0; first < threads.size(); first++) {
        if (!belongs(threads[first])) continue;
        unsigned last = first;
        while (last + 1 < threads.size() && belongs(threads[last + 1])) last++;
        text += text.empty() ? "" : ", ";
        text += std::to_string(first) + (last > first ? "-" + std::to_string(last) : "");
        first = last;
    }
    return "threads " + text;
}

std::string doing(const Thread& t) {
    if (t.state == DONE) return "have returned";
    char mask[24] = "";
    if (t.state == AT_EXCHANGE) snprintf(mask, sizeof mask, " with mask %08x", t.mask);
    const char* what = t.state == AT_BARRIER ? "__syncthreads" : t.what;
    return std::string("wait at ") + what + mask + " (line " + std::to_string(t.line) + ")";
}

// Nobody can go on. The message says what each thread waits for: of the whole block at a barrier,
// of one warp at a shuffle.
[[noreturn]] void stuck() {
    const Thread* blamed = nullptr;
    for (auto& t : threads)
        if (t.state == AT_EXCHANGE || (t.state == AT_BARRIER && !blamed)) {
            blamed = &t;
            if (t.state == AT_EXCHANGE) break;
        }
    bool at_barrier = blamed->state == AT_BARRIER;
    auto concerned = [&](const Thread& t) {
        return at_barrier || t.number / LANES == blamed->number / LANES;
    };
    std::set<std::string> groups;
    for (auto& t : threads)
        if (concerned(t)) groups.insert(doing(t));
    std::string text;
    for (auto& group : groups) {
        text += text.empty() ? "" : "; ";
        text += named([&](const Thread& t) { return concerned(t) && doing(t) == group; });
        text += " " + group;
    }
    fail(*blamed, at_line(blamed->line),
         at_barrier ? "divergent barrier" : "deadlock, lanes of the mask are missing",
         "waits for others that do not come: %s", text.c_str());
}

void release_barrier() {
    for (auto& t : threads)
        if (t.state != AT_BARRIER || t.line != threads[0].line) stuck();
    last_barrier = ++now;
    effort_since_meeting = 0;
    for (auto& t : threads) wake(t);
}

// If all lanes of the current thread's mask have arrived, each gets its value and may go on.
bool complete_exchange() {
    Thread* warp = &threads[current->number / LANES * LANES];
    unsigned lanes = threads.data() + threads.size() - warp;
    unsigned mask = lanes < LANES ? current->mask & ((1u << lanes) - 1) : current->mask;
    unsigned ballot = 0;
    auto in_mask = [&](unsigned lane) { return lane < LANES && (mask >> lane & 1); };
    for (unsigned lane = 0; lane < LANES; lane++) {
        if (!in_mask(lane)) continue;
        if (warp[lane].state != AT_EXCHANGE) return false;
        if (warp[lane].given) ballot |= 1u << lane;
    }
    for (unsigned lane = 0; lane < LANES; lane++) {
        if (!in_mask(lane)) continue;
        Thread& t = warp[lane];
        if (t.mask != current->mask || t.line != current->line || t.what != current->what)
            fail(*current, at_line(current->line), "divergent warp",
                 "is in %s with mask %08x, lane %u of its warp in %s with mask %08x (line %d)",
                 current->what, current->mask, lane, t.what, t.mask, t.line);
        if (t.source != BALLOT && !in_mask(t.source))
            fail(t, at_line(t.line), "shuffle from a missing lane",
                 "reads lane %d in %s, which is not among the lanes of mask %08x in this block",
                 t.source, t.what, t.mask);
        t.received = t.source == BALLOT ? ballot : warp[t.source].given;
    }
    bool orders_memory = std::string("__syncwarp") == current->what;  // a shuffle does not
    now += orders_memory;
    for (unsigned lane = 0; lane < LANES; lane++) {
        if (!in_mask(lane)) continue;
        for (unsigned other = 0; orders_memory && other < LANES; other++)
            if (in_mask(other)) warp[lane].synced[other] = now;
        if (&warp[lane] != current) wake(warp[lane]);
    }
    current->state = READY;
    effort_since_meeting = 0;
    return true;
}

// ---------------------------------------------------------------- running

void run_block(unsigned number) {
    block_number = number;
    block_at = index_in(number, grid);
    block_start = last_barrier = ++now;
    ready.clear();
    poison_shared_memory();
    for (auto& t : threads) {
        for (auto& time : t.synced) time = 0;
        t.started = false;
        wake(t);
    }
    volatile unsigned done = 0;  // volatile, because it changes between _setjmp and _longjmp
    while (done < threads.size()) {
        if (ready.empty()) release_barrier();
        unsigned place = random_below(ready.size());
        std::swap(ready[place], ready.back());
        current = &threads[ready.back()];
        ready.pop_back();
        if (!_setjmp(scheduler)) {
            if (current->started) _longjmp(current->registers, 1);
            current->started = true;
            start(*current);
        }
        if (current->state == DONE) done = done + 1;
    }
    if (counting) count_end_of_block();
}
}  // namespace

std::string tuple(uint3 i) {
    char text[48];
    snprintf(text, sizeof text, "(%u, %u, %u)", i.x, i.y, i.z);
    return text;
}

uint3 index_in(unsigned number, uint3 size) {
    return {number % size.x, number / size.x % size.y, number / size.x / size.y};
}

void fail(const Thread& thread, Place place, const char* kind, const char* format, ...) {
    char text[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    char where[16];
    snprintf(where, sizeof where, "@%x", place);
    error = std::string(where) + ": " + kind + ": block " + tuple(block_at) + ", thread " +
            tuple(thread.index) + " " + text;
    _longjmp(launch_end, 1);
}

void give_way(unsigned effort) {
    if ((effort_since_meeting += effort) > PATIENCE)
        fail(*current, at_line(current->line), "endless loop",
             "runs on while no thread of its block meets another or returns");
    wake(*current);
    leave();
}

uint3 thread_index() { return current->index; }
uint3 block_index() { return block_at; }
uint3 block_size() { return block; }
uint3 grid_size() { return grid; }
unsigned lane() { return current->number % LANES; }

void fence() { last_fence = ++now; }

void barrier(int line) {
    current->line = line;
    current->state = AT_BARRIER;
    leave();
}

uint64_t exchange(const char* what, unsigned mask, uint64_t mine, int source, int line) {
    Thread& me = *current;
    me.line = line;
    me.what = what;
    me.mask = mask;
    me.given = mine;
    me.source = source;
    if (!(mask >> lane() & 1))
        fail(me, at_line(line), "wrong mask", "calls %s with mask %08x, which lacks its lane %u",
             what, mask, lane());
    me.state = AT_EXCHANGE;
    if (!complete_exchange()) leave();
    return me.received;
}

// Run the kernel over the grid. grid, block: x, y, z. The result: null, or what went wrong.
EXPORT const char* cuda_cpu_launch(void (*kernel)(void**), void** its_arguments,
                                   const unsigned* grid_, const unsigned* block_, uint64_t seed) {
    grid = {grid_[0], grid_[1], grid_[2]};
    block = {block_[0], block_[1], block_[2]};
    body = kernel;
    arguments = its_arguments;
    random_state = seed * 2 + 1;  // never 0, where xorshift stays
    now = block_start = last_barrier = last_fence = 1;
    effort_since_meeting = 0;
    error.clear();
    threads.assign(block.x * block.y * block.z, Thread{});
    std::unique_ptr<char[]> stacks(new char[threads.size() * STACK_BYTES]);
    for (unsigned t = 0; t < threads.size(); t++) {
        threads[t].number = t;
        threads[t].index = index_in(t, block);
        threads[t].stack = stacks.get() + size_t(t) * STACK_BYTES;
    }
    if (!_setjmp(launch_end))
        for (unsigned b = 0; b < grid.x * grid.y * grid.z; b++) run_block(b);
    current = nullptr;
    return error.empty() ? nullptr : error.c_str();
}

}  // namespace cuda_cpu
