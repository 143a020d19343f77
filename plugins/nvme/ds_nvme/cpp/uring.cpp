// io_uring by raw system calls: two rings of memory shared with the kernel. The structures are the kernel's stable interface
// (include/uapi/linux/io_uring.h), written down here so that no header of this machine is asked for them.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "engine.h"

#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#endif

namespace ds {
namespace {

struct SubmissionOffsets {
    uint32_t head, tail, mask, entries, flags, dropped, array, reserved;
    uint64_t address;
};

struct CompletionOffsets {
    uint32_t head, tail, mask, entries, overflow, events, flags, reserved;
    uint64_t address;
};

struct Params {
    uint32_t submissions, completions, flags, cpu, idle, features, other, reserved[3];
    SubmissionOffsets submission;
    CompletionOffsets completion;
};

struct Submission {
    uint8_t opcode, flags;
    uint16_t priority;
    int32_t file;
    uint64_t offset, address;
    uint32_t length, options;
    uint64_t user;
    uint64_t reserved[3];
};

struct Completion {
    uint64_t user;
    int32_t result;
    uint32_t flags;
};

static_assert(sizeof(Params) == 120 && sizeof(Submission) == 64 && sizeof(Completion) == 16, "the kernel's sizes");

constexpr uint64_t AT_SUBMISSIONS = 0, AT_COMPLETIONS = 0x8000000, AT_ENTRIES = 0x10000000;
constexpr uint32_t SINGLE_ISSUER = 1u << 12, DEFER_TASKRUN = 1u << 13;  // since 6.1; work is done when it is waited for
constexpr unsigned GET_EVENTS = 1;
constexpr uint8_t READ = 22, WRITE = 23;  // since 5.6

int setup(unsigned depth, Params& params) {
    for (uint32_t flags : {SINGLE_ISSUER | DEFER_TASKRUN, 0u}) {
        params = {};
        params.flags = flags;
        const int ring = (int)syscall(__NR_io_uring_setup, depth, &params);
        if (ring >= 0 || errno != EINVAL) return ring;
    }
    return -1;
}

std::string reason(const char* what, int error) {
    std::string said = std::string(what) + ": " + std::strerror(error);
    if (error == ENOSYS) said += " (the kernel has no io_uring)";
    if (error == EPERM || error == EACCES) said += " (kernel.io_uring_disabled, or the container's seccomp profile, forbids it)";
    if (error == ENOMEM) said += " (raise `ulimit -l`)";
    return said;
}

template <class T>
T load(const T* at) {
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

template <class T>
void store(T* at, T value) {
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

class Uring final : public Backend {
public:
    explicit Uring(unsigned depth) {
        ring_ = setup(depth, params_);
        if (ring_ < 0) throw std::runtime_error(reason("io_uring_setup", errno));
        try {
            const auto& s = params_.submission;
            const auto& c = params_.completion;
            submissions_ = map(submissions_size_ = s.array + params_.submissions * sizeof(uint32_t), AT_SUBMISSIONS);
            completions_ = map(completions_size_ = c.events + params_.completions * sizeof(Completion), AT_COMPLETIONS);
            entries_ = (Submission*)map(entries_size_ = params_.submissions * sizeof(Submission), AT_ENTRIES);
            tail_ = (uint32_t*)(submissions_ + s.tail);
            array_ = (uint32_t*)(submissions_ + s.array);
            mask_ = *(uint32_t*)(submissions_ + s.mask);
            done_head_ = (uint32_t*)(completions_ + c.head);
            done_tail_ = (uint32_t*)(completions_ + c.tail);
            done_mask_ = *(uint32_t*)(completions_ + c.mask);
            done_ = (Completion*)(completions_ + c.events);
        } catch (...) {
            release();
            throw;
        }
    }

    ~Uring() override { release(); }

    void add(Block* block) override {
        const uint32_t tail = *tail_, slot = tail & mask_;
        Submission& entry = entries_[slot];
        entry = {};
        entry.opcode = block->transfer->write ? WRITE : READ;
        entry.file = block->transfer->file;
        entry.offset = (uint64_t)block->offset();
        entry.address = (uint64_t)(uintptr_t)block->memory();
        entry.length = (uint32_t)block->rest();
        entry.user = (uint64_t)(uintptr_t)block;
        array_[slot] = slot;
        store(tail_, tail + 1);
        waiting_++;
    }

    void submit(int wait_for, std::vector<Event>& events) override {
        do {
            const long taken = syscall(__NR_io_uring_enter, ring_, waiting_, wait_for, GET_EVENTS, nullptr, (size_t)0);
            if (taken >= 0)
                waiting_ -= (unsigned)taken;
            else if (errno != EINTR && errno != EAGAIN && errno != EBUSY)
                throw std::runtime_error(reason("io_uring_enter", errno));
            uint32_t head = *done_head_;
            for (const uint32_t tail = load(done_tail_); head != tail; head++) {
                const Completion& found = done_[head & done_mask_];
                events.push_back({(Block*)(uintptr_t)found.user, found.result});
                if (wait_for) wait_for--;
            }
            store(done_head_, head);
        } while (waiting_ || wait_for);
    }

private:
    char* map(size_t size, uint64_t offset) {
        void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, (off_t)offset);
        if (at == MAP_FAILED) throw std::runtime_error(reason("mapping the rings of io_uring", errno));
        return (char*)at;
    }

    void release() {
        if (entries_) munmap(entries_, entries_size_);
        if (completions_) munmap(completions_, completions_size_);
        if (submissions_) munmap(submissions_, submissions_size_);
        if (ring_ >= 0) ::close(ring_);
    }

    Params params_{};
    int ring_ = -1;
    char *submissions_ = nullptr, *completions_ = nullptr;
    Submission* entries_ = nullptr;
    size_t submissions_size_ = 0, completions_size_ = 0, entries_size_ = 0;
    uint32_t *tail_ = nullptr, *array_ = nullptr, *done_head_ = nullptr, *done_tail_ = nullptr;
    uint32_t mask_ = 0, done_mask_ = 0;
    Completion* done_ = nullptr;
    unsigned waiting_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_uring(unsigned depth) { return std::make_unique<Uring>(depth); }

}  // namespace ds
