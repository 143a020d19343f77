// Transfers, the blocks they are cut into, and who brings blocks to the kernel.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace ds {

constexpr int64_t ALIGNMENT = 4096;

enum class Failure { none, error, ended, changed };

// One read or write of a range of a file. sums: of each block: computed by a write, compared by a read; empty: neither.
struct Transfer {
    int file;
    bool write, direct;
    int64_t offset;
    char* memory;
    int64_t size, block;
    std::vector<uint64_t> sums;

    std::mutex mutex;
    std::condition_variable over;
    int64_t left = 0;  // blocks that are not done; the memory is in use as long as there are any
    Failure failure = Failure::none;
    int number = 0;  // errno
    int64_t at = 0;

    int64_t blocks() const { return (size + block - 1) / block; }
    void fail(Failure kind, int error, int64_t where);
    void finish_block();
    bool failed();
    bool wait(double seconds);
};

// A part of a transfer that is at the kernel.
struct Block {
    std::shared_ptr<Transfer> transfer;
    int64_t begin = 0, size = 0, done = 0;
    bool used = false;

    char* memory() const { return transfer->memory + begin + done; }
    int64_t offset() const { return transfer->offset + begin + done; }
    int64_t rest() const { return size - done; }
};

struct Event {
    Block* block;
    int64_t result;  // bytes, or -errno
};

// How blocks get to the kernel; each worker has its own. The constructor throws std::runtime_error with the reason why it
// cannot be used here.
struct Backend {
    virtual ~Backend() = default;
    virtual void add(Block* block) = 0;                        // put into the next submission
    virtual void submit(int wait_for, std::vector<Event>&) = 0;  // hand over, wait for so many events, take what is there
};

std::unique_ptr<Backend> make_uring(unsigned depth);
std::unique_ptr<Backend> make_kernel_aio(unsigned depth);
std::unique_ptr<Backend> make_plain();

uint64_t checksum(const char* data, int64_t size);

class Engine {
public:
    Engine(std::string kind, int64_t block, int depth, int threads, bool single, bool overlap);
    ~Engine();
    void start(const std::shared_ptr<Transfer>& transfer);
    void close();
    bool ours() const;  // false in a process that was forked from the engine's: it has none of the threads

private:
    struct Part {
        std::shared_ptr<Transfer> transfer;
        int64_t index;
    };
    std::unique_ptr<Backend> make() const;
    void work(std::unique_ptr<Backend>& backend);
    void serve(Backend& backend, std::vector<Block>& blocks);
    bool take(Part& part, bool wait);
    bool begin(Block& block, const Part& part);
    bool advance(const Event& event);  // whether the block is done
    void finish(Block& block);         // compares its checksum, and gives it up

    const std::string kind_;
    const int64_t block_;
    const int depth_;
    const bool single_, overlap_;
    const int process_;
    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<Part> parts_;
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace ds
