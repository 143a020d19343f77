// The kernel's AIO by raw system calls (what libaio wraps), and plain pread and pwrite.
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "engine.h"

namespace ds {
namespace {

std::string reason(const char* what, int error) {
    std::string said = std::string(what) + ": " + std::strerror(error);
    if (error == EAGAIN) said += " (raise fs.aio-max-nr)";
    if (error == ENOSYS) said += " (the kernel has no AIO)";
    return said;
}

class KernelAio final : public Backend {
public:
    explicit KernelAio(unsigned depth) : requests_(depth), found_(depth) {
        if (syscall(__NR_io_setup, depth, &context_) < 0) throw std::runtime_error(reason("io_setup", errno));
        for (auto& request : requests_) free_.push_back(&request);
    }

    ~KernelAio() override { syscall(__NR_io_destroy, context_); }

    void add(Block* block) override {
        iocb* request = free_.back();
        free_.pop_back();
        *request = {};
        request->aio_data = (uint64_t)(uintptr_t)block;
        request->aio_lio_opcode = block->transfer->write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        request->aio_fildes = (uint32_t)block->transfer->file;
        request->aio_buf = (uint64_t)(uintptr_t)block->memory();
        request->aio_nbytes = (uint64_t)block->rest();
        request->aio_offset = block->offset();
        waiting_.push_back(request);
    }

    void submit(int wait_for, std::vector<Event>& events) override {
        size_t begin = 0;
        while (begin < waiting_.size()) {
            const long taken =
                syscall(__NR_io_submit, context_, (long)(waiting_.size() - begin), waiting_.data() + begin);
            if (taken > 0) {
                begin += (size_t)taken;
            } else if (taken < 0 && errno != EINTR && errno != EAGAIN) {  // the first one is refused, and is at fault
                events.push_back({(Block*)(uintptr_t)waiting_[begin]->aio_data, -errno});
                free_.push_back(waiting_[begin++]);
                if (wait_for) wait_for--;
            } else if (errno == EAGAIN) {
                collect(1, events);
            }
        }
        waiting_.clear();
        do wait_for -= collect(std::max(wait_for, 0), events);
        while (wait_for > 0);
    }

private:
    int collect(int least, std::vector<Event>& events) {
        const long got = syscall(__NR_io_getevents, context_, (long)least, (long)found_.size(), found_.data(), nullptr);
        if (got < 0 && errno != EINTR) throw std::runtime_error(reason("io_getevents", errno));
        for (long i = 0; i < got; i++) {
            events.push_back({(Block*)(uintptr_t)found_[(size_t)i].data, found_[(size_t)i].res});
            free_.push_back((iocb*)(uintptr_t)found_[(size_t)i].obj);
        }
        return got > 0 ? (int)got : 0;
    }

    aio_context_t context_ = 0;
    std::vector<iocb> requests_;
    std::vector<io_event> found_;
    std::vector<iocb*> free_, waiting_;
};

class Plain final : public Backend {
public:
    void add(Block* block) override { waiting_.push_back(block); }

    void submit(int, std::vector<Event>& events) override {
        for (Block* block : waiting_) {
            const int file = block->transfer->file;
            const auto size = (size_t)block->rest();
            const ssize_t moved = block->transfer->write ? pwrite(file, block->memory(), size, block->offset())
                                                         : pread(file, block->memory(), size, block->offset());
            events.push_back({block, moved < 0 ? -(int64_t)errno : (int64_t)moved});
        }
        waiting_.clear();
    }

private:
    std::vector<Block*> waiting_;
};

}  // namespace

std::unique_ptr<Backend> make_kernel_aio(unsigned depth) { return std::make_unique<KernelAio>(depth); }
std::unique_ptr<Backend> make_plain() { return std::make_unique<Plain>(); }

}  // namespace ds
