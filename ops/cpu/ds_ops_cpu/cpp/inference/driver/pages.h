// Memory that is read from end to end again and again, in large pages.
//
// Two threads read a gigabyte in small pages at 0.8 of the rate: the processor's prefetching stops at the end of a page.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ds {
namespace inference {

// Asks the kernel to put what lies in `ranges` (address, bytes) into large pages where at least half of one is theirs;
// contents and addresses stay. Returns how many bytes lie in large pages now: none where the system has no such pages.
inline long use_large_pages(const std::vector<std::pair<uintptr_t, long>>& ranges) {
    constexpr uintptr_t PAGE = 2 << 20;
    long moved = 0;
#if defined(__linux__)
    constexpr int COLLAPSE = 25;  // MADV_COLLAPSE, Linux 6.1
    std::map<uintptr_t, uintptr_t> used;
    for (auto [at, size] : ranges) {
        const uintptr_t end = at + (uintptr_t)size;
        for (uintptr_t page = at / PAGE; page * PAGE < end; page++)
            used[page] += std::min(end, (page + 1) * PAGE) - std::max(at, page * PAGE);
    }
    for (auto [page, bytes] : used)
        if (bytes >= PAGE / 2 && madvise(reinterpret_cast<void*>(page * PAGE), PAGE, COLLAPSE) == 0) moved += PAGE;
#endif
    return moved;
}

}  // namespace inference
}  // namespace ds
