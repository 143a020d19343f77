// A file that all ranks of a group have mapped: its parts, who is gone, and sleeping until a number changes.
//
// [Note: waiting] A short spin where each rank has a core of its own, then futex. Whoever sleeps has raised the
// `sleepers` flag of the rank it waits for; that rank looks at it after it has raised its stage, so that nobody makes a
// system call when nobody sleeps.
//
// [Note: who is gone] Each rank holds a POSIX record lock on the byte of its number. The kernel gives it up when the
// process ends, however it ends, also while it is a zombie; children do not inherit it, and no process id is compared.
// Sleepers wake ten times a second and look at those they wait for.
#pragma once

#include <pybind11/pybind11.h>

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ds {
namespace shared {

namespace py = pybind11;

enum Failure : uint32_t { OK = 0, GONE = 1, LATE = 2, DIFFERENT = 3, INTERRUPTED = 4, LEFT = 5 };

struct Failed {
    uint32_t code;
    int rank;  // whose fault it is
};

constexpr long CHECK_NS = 100'000'000;
constexpr size_t TEXT = 160;
constexpr size_t KEY = 32;

// What a rank says of the collective that a round begins. tag: the comms guard's, 0 when it is off.
struct Call {
    uint64_t tag, digest;
    char text[TEXT];
};

struct alignas(256) Control {
    std::atomic<uint32_t> stage;
    std::atomic<uint32_t> sleepers;
    alignas(64) std::atomic<uint32_t> failure;  // code | rank << 8
    alignas(64) Call calls[2];
};

struct alignas(256) Head {
    char key[KEY];
};

// Counts bytes, modulo 2^32; each flag is of who sleeps on the number before it. The bytes themselves come a page later.
struct Ring {
    std::atomic<uint32_t> written, reader_sleeps;
    alignas(64) std::atomic<uint32_t> taken;
    std::atomic<uint32_t> writer_sleeps;
};

constexpr size_t RING_HEAD = 4096;

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4, "a futex is 32 bits");

inline long now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000L + t.tv_nsec;
}

inline void pause_briefly() {
#ifdef DS_X86
    __builtin_ia32_pause();
#endif
}

inline uint64_t digest_of(const std::string& text) {
    uint64_t h = 1469598103934665603ull;
    for (unsigned char c : text) h = (h ^ c) * 1099511628211ull;
    return h;
}

// The mapped file of one rank: a head, each rank's control and two boxes, then the rings.
class Memory {
  public:
    // descriptor: of a file of `bytes_for` and `ring_bytes_for` bytes, zeros after `key`; this object closes it.
    // ring: a power of two.
    Memory(int descriptor, const std::string& key, int rank, int size, size_t box, size_t ring, double timeout,
            long spin_ns)
        : fd_(descriptor), rank_(rank), size_(size), box_(box), ring_(ring), timeout_ns_((long)(timeout * 1e9)),
          spin_ns_(spin_ns) {
        if (key.size() != KEY || rank < 0 || rank >= size || box % 4096 || ring < 4096 || ring > (1u << 30) ||
            (ring & (ring - 1)))
            throw py::value_error("not a segment");
        bytes_ = bytes_for(size, box);
        void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
        if (at == MAP_FAILED) {
            const std::string why = strerror(errno);
            close(fd_);
            throw std::runtime_error("the shared memory cannot be mapped: " + why);
        }
        base_ = (char*)at;
        at = mmap(nullptr, ring_bytes_for(size, ring), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_,
                  (off_t)bytes_);
        if (at == MAP_FAILED) {
            const std::string why = strerror(errno);
            release();
            throw std::runtime_error("the shared memory of rings cannot be mapped: " + why);
        }
        rings_ = (char*)at;
        const bool ours = memcmp(((Head*)base_)->key, key.data(), KEY) == 0;
        if (!ours || !lock()) {
            const std::string why = ours ? strerror(errno) : "it is another one's";
            release();
            throw std::runtime_error("the shared memory cannot be used: " + why);
        }
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { release(); }

    static size_t bytes_for(int size, size_t box) {
        const size_t head = sizeof(Head) + sizeof(Control) * (size_t)size;
        return (head + 4095) / 4096 * 4096 + box * 2 * (size_t)size;
    }

    static size_t ring_bytes_for(int size, size_t ring) { return (RING_HEAD + ring) * (size_t)(size * size); }

    // From now on the others are told that this rank has left, if they wait for it.
    void leave() {
        if (base_) fail({LEFT, rank_});
    }

    // Whether `rank` will send and take no more: GONE or LEFT, or 0. What it sent before is still there.
    uint32_t lost(int rank) const {
        if (!base_ || rank < 0 || rank >= size_ || rank == rank_) throw py::value_error("no such peer");
        if ((control(rank).failure.load() & 0xff) == LEFT) return LEFT;
        return gone(rank) ? GONE : OK;
    }

  protected:
    Control& control(int r) const { return ((Control*)(base_ + sizeof(Head)))[r]; }
    char* boxes() const { return base_ + bytes_ - box_ * 2 * (size_t)size_; }

    static void wake(std::atomic<uint32_t>& number, std::atomic<uint32_t>& sleeps) {
        if (!sleeps.load()) return;
        sleeps.store(0);
        syscall(SYS_futex, (uint32_t*)&number, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }

    bool lock() const {
        struct flock mine = {};
        mine.l_type = F_WRLCK;
        mine.l_whence = SEEK_SET;
        mine.l_start = rank_;
        mine.l_len = 1;
        return fcntl(fd_, F_SETLK, &mine) == 0;
    }

    bool gone(int r) const {
        struct flock theirs = {};
        theirs.l_type = F_WRLCK;
        theirs.l_whence = SEEK_SET;
        theirs.l_start = r;
        theirs.l_len = 1;
        return fcntl(fd_, F_GETLK, &theirs) == 0 && theirs.l_type == F_UNLCK;
    }

    void release() {
        leave();
        if (base_) munmap(base_, bytes_);
        if (rings_) munmap(rings_, ring_bytes_for(size_, ring_));
        if (fd_ >= 0) close(fd_);
        base_ = rings_ = nullptr;
        fd_ = -1;
    }

    void fail(Failed why) {
        uint32_t none = 0;
        control(rank_).failure.compare_exchange_strong(none, why.code | (uint32_t)why.rank << 8);
    }

    int fd_, rank_, size_;
    size_t box_, ring_, bytes_ = 0;
    long timeout_ns_, spin_ns_;
    char *base_ = nullptr, *rings_ = nullptr;
};

}  // namespace shared
}  // namespace ds
