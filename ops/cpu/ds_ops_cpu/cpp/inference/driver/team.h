// Threads that meet often: a barrier which looks for a while before it sleeps.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace ds {
namespace inference {

class Barrier {
  public:
    // meanwhile(i): work for the i-th look at whether all are there; false: none is left.
    template <class Fn>
    void wait(int threads, const Fn& meanwhile) {
        if (threads == 1) return;
        const int turn = turn_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1);
            if (asleep_.load()) wake();
            return;
        }
        for (int i = 0; i < LOOKS; i++) {
            if (turn_.load(std::memory_order_acquire) != turn) return;
            if (!meanwhile(i)) pause();
        }
        asleep_.fetch_add(1);
        while (turn_.load() == turn) sleep(turn);
        asleep_.fetch_sub(1);
    }

  private:
    static constexpr int LOOKS = 4000;  // about 50 us; a unit of work takes a few

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
#if defined(__linux__)
    void sleep(int turn) { syscall(SYS_futex, &turn_, FUTEX_WAIT_PRIVATE, turn, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &turn_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void sleep(int) { std::this_thread::yield(); }
    void wake() {}
#endif

    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> turn_{0};
    std::atomic<int> asleep_{0};
};

}  // namespace inference
}  // namespace ds
