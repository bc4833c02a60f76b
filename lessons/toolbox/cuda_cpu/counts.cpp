// What a GPU's memory would see of a launch. A load of a warp is one request; the lanes' k-th runs
// of one instruction are taken for it. A request costs, in global memory, the sectors of 32 bytes
// that it touches; in shared memory, the turns that it takes, because each of the 32 banks gives
// one word of 4 bytes a turn (CUDA C++ Programming Guide, "Shared Memory"; Nsight Compute calls the
// turns wavefronts).
#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <tuple>

#include "emulator.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace cuda_cpu {

bool counting = false;

namespace {
constexpr uintptr_t SECTOR = 32, BANKS = 32, WORD = 4;

using Request = std::array<uintptr_t, LANES>;  // an address for each lane; 0: it takes no part

// All that one instruction did in one tensor or variable.
struct Site {
    size_t requests = 0, sectors = 0, turns = 0, conflicts = 0;
    std::vector<size_t> times;                   // how often each thread of the block ran it
    std::vector<std::vector<Request>> of_warp;   // the block's requests
};

using Key = std::tuple<Place, Access, size_t, std::string, Kind>;  // size in bytes, memory's name
std::map<Key, Site> sites;

size_t sectors_of(const Request& request, size_t bytes) {
    std::vector<uintptr_t> sectors;
    for (uintptr_t address : request)
        for (uintptr_t s = address / SECTOR; address && s <= (address + bytes - 1) / SECTOR; s++)
            sectors.push_back(s);
    std::sort(sectors.begin(), sectors.end());
    return std::unique(sectors.begin(), sectors.end()) - sectors.begin();
}

// In a turn, lanes that want the same word share it; different words of one bank take a turn each.
size_t turns_of(const Request& request, size_t first, size_t lanes, size_t bytes) {
    std::vector<uintptr_t> words;
    for (size_t lane = first; lane < first + lanes; lane++) {
        uintptr_t at = request[lane];
        for (uintptr_t w = at / WORD; at && w <= (at + bytes - 1) / WORD; w++) words.push_back(w);
    }
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    size_t in_bank[BANKS] = {}, most = 0;
    for (uintptr_t word : words) most = std::max(most, ++in_bank[word % BANKS]);
    return most;
}

void add(Site& site, const Request& request, size_t bytes, Kind kind) {
    site.requests++;
    if (kind == GLOBAL) {
        site.sectors += sectors_of(request, bytes);
        return;
    }
    // 8 bytes a lane go by half warps, 16 by quarters: the banks give 128 bytes a turn
    size_t lanes = LANES / std::max<size_t>(1, bytes / WORD);
    for (size_t first = 0; first < LANES; first += lanes) {
        size_t turns = turns_of(request, first, lanes, bytes);
        site.turns += turns;
        site.conflicts += turns ? turns - 1 : 0;
    }
}
}  // namespace

void count(const Memory& memory, uintptr_t address, size_t bytes, Access how, Place place) {
    Site& site = sites[{place, how, bytes, memory.name, memory.kind}];
    if (site.times.empty()) {
        site.times.resize(threads.size());
        site.of_warp.resize((threads.size() + LANES - 1) / LANES);
    }
    auto& requests = site.of_warp[current->number / LANES];
    size_t k = site.times[current->number]++;
    if (k >= requests.size()) requests.resize(k + 1, Request{});
    requests[k][current->number % LANES] = address;
}

void count_end_of_block() {
    for (auto& [key, site] : sites) {
        for (auto& requests : site.of_warp)
            for (auto& request : requests) add(site, request, std::get<2>(key), std::get<4>(key));
        site.times.clear();
        site.of_warp.clear();
    }
}

EXPORT void cuda_cpu_start_counting(int yes) {
    counting = yes;
    sites.clear();
}

// A line for each site: place in hex, access, bytes, kind of memory, requests, sectors, turns,
// conflicts, the memory's name.
EXPORT const char* cuda_cpu_counts() {
    static std::string text;
    text.clear();
    for (auto& [key, site] : sites) {
        auto& [place, how, bytes, name, kind] = key;
        char line[160];
        snprintf(line, sizeof line, "%x %d %zu %d %zu %zu %zu %zu ", place, how, bytes, kind,
                 site.requests, site.sectors, site.turns, site.conflicts);
        text += line + name + "\n";
    }
    return text.c_str();
}

}  // namespace cuda_cpu
