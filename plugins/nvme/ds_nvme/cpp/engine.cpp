// Worker threads that keep `depth` blocks under way each, whatever brings them to the kernel.
#include "engine.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <future>
#include <stdexcept>

namespace ds {

// -- transfers ----------------------------------------------------------------------------------------------------------------

void Transfer::fail(Failure kind, int error, int64_t where) {
    std::lock_guard<std::mutex> held(mutex);
    if (failure != Failure::none) return;
    failure = kind;
    number = error;
    at = where;
}

bool Transfer::failed() {
    std::lock_guard<std::mutex> held(mutex);
    return failure != Failure::none;
}

void Transfer::finish_block() {
    std::lock_guard<std::mutex> held(mutex);
    if (--left == 0) over.notify_all();
}

bool Transfer::wait(double seconds) {
    std::unique_lock<std::mutex> held(mutex);
    return over.wait_for(held, std::chrono::duration<double>(seconds), [&] { return left == 0; });
}

// -- checksums ----------------------------------------------------------------------------------------------------------------

// Lanes of xor, multiplication by an odd number and rotation. Each step is invertible in the word and in the lane, so that a
// change within one word always changes the sum; other damage goes unseen once in 2^64. Sums never leave the process, so
// machines may have different numbers of lanes.
namespace {

constexpr uint64_t P = 0x9E3779B97F4A7C15u, Q = 0xC2B2AE3D27D4EB4Fu;
constexpr int MOST = 32, LEFT = 29;

// These take whole rows of words, one for each lane, and say how many bytes that was.
int64_t mix(uint64_t* lane, const char* data, int64_t size) {
    int64_t at = 0;
    for (; at + 64 <= size; at += 64) {
        uint64_t word[8];
        std::memcpy(word, data + at, 64);
        for (int i = 0; i < 8; i++) {
            const uint64_t mixed = (lane[i] ^ word[i]) * P;
            lane[i] = (mixed << LEFT) | (mixed >> (64 - LEFT));
        }
    }
    return at;
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512dq"))) int64_t mix_avx512(uint64_t* lane, const char* data, int64_t size) {
    __m512i lanes[4];
    for (int i = 0; i < 4; i++) lanes[i] = _mm512_loadu_si512(lane + 8 * i);
    const __m512i factor = _mm512_set1_epi64((long long)P);
    int64_t at = 0;
    for (; at + 256 <= size; at += 256)
        for (int i = 0; i < 4; i++) {
            const __m512i words = _mm512_loadu_si512(data + at + 64 * i);
            lanes[i] = _mm512_rol_epi64(_mm512_mullo_epi64(_mm512_xor_si512(lanes[i], words), factor), LEFT);
        }
    for (int i = 0; i < 4; i++) _mm512_storeu_si512(lane + 8 * i, lanes[i]);
    return at;
}

bool wide() {
    static const bool found = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
    return found;
}
#else
int64_t mix_avx512(uint64_t* lane, const char* data, int64_t size) { return mix(lane, data, size); }
bool wide() { return false; }
#endif

}  // namespace

uint64_t checksum(const char* data, int64_t size) {
    uint64_t lane[MOST];
    for (int i = 0; i < MOST; i++) lane[i] = P * (uint64_t)(i + 1);
    int64_t at = wide() ? mix_avx512(lane, data, size) : 0;
    at += mix(lane, data + at, size - at);
    uint64_t sum = (uint64_t)size;
    auto fold = [&sum](uint64_t value) {
        sum = (sum ^ value) * Q;
        sum ^= sum >> 32;
    };
    for (uint64_t value : lane) fold(value);
    for (; at < size; at++) fold((unsigned char)data[at]);
    return sum;
}

// -- engine -------------------------------------------------------------------------------------------------------------------

Engine::Engine(std::string kind, int64_t block, int depth, int threads, bool single, bool overlap)
    : kind_(std::move(kind)), block_(block), depth_(kind_ == "threads" ? 1 : depth), single_(single), overlap_(overlap),
      process_((int)getpid()) {
    if (block < ALIGNMENT || block % ALIGNMENT) throw std::invalid_argument("block_size must be a multiple of 4096");
    const int workers = kind_ == "threads" ? std::max(threads, std::min(depth, 16)) : threads;
    sigset_t all, before;  // signals are for Python's threads
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    std::string problem;
    for (int i = 0; i < workers && problem.empty(); i++) {
        std::promise<std::string> said;
        auto answer = said.get_future();
        threads_.emplace_back([this, said = std::move(said)]() mutable {
            std::unique_ptr<Backend> backend;
            try {
                backend = make();
            } catch (const std::exception& error) {
                said.set_value(error.what());
                return;
            }
            said.set_value("");
            work(backend);
        });
        problem = answer.get();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!problem.empty()) {
        close();
        throw std::runtime_error(problem);
    }
}

Engine::~Engine() { close(); }

bool Engine::ours() const { return (int)getpid() == process_; }

std::unique_ptr<Backend> Engine::make() const {
    if (kind_ == "io_uring") return make_uring((unsigned)depth_);
    if (kind_ == "kernel aio") return make_kernel_aio((unsigned)depth_);
    if (kind_ == "threads") return make_plain();
    throw std::invalid_argument("no engine is called " + kind_);
}

void Engine::close() {
    {
        std::lock_guard<std::mutex> held(mutex_);
        closing_ = true;
    }
    more_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
}

void Engine::start(const std::shared_ptr<Transfer>& transfer) {
    if (!ours()) throw std::runtime_error("a forked process cannot use its parent's engine");
    transfer->block = block_;
    const int64_t blocks = transfer->blocks();
    transfer->left = blocks;
    {
        std::lock_guard<std::mutex> held(mutex_);
        if (closing_) throw std::runtime_error("the engine is closed");
        for (int64_t i = 0; i < blocks; i++) parts_.push_back({transfer, i});
    }
    if (blocks > 1)
        more_.notify_all();
    else
        more_.notify_one();
}

bool Engine::take(Part& part, bool wait) {
    std::unique_lock<std::mutex> held(mutex_);
    if (wait) more_.wait(held, [&] { return closing_ || !parts_.empty(); });
    if (parts_.empty()) return false;
    part = std::move(parts_.front());
    parts_.pop_front();
    return true;
}

bool Engine::begin(Block& block, const Part& part) {
    auto& transfer = *part.transfer;
    if (transfer.failed()) {
        transfer.finish_block();
        return false;
    }
    block = {part.transfer, part.index * block_, std::min(block_, transfer.size - part.index * block_), 0, true};
    if (transfer.write && !transfer.sums.empty())
        transfer.sums[(size_t)part.index] = checksum(block.memory(), block.size);
    return true;
}

bool Engine::advance(const Event& event) {
    Block& block = *event.block;
    Transfer& transfer = *block.transfer;
    if (event.result == -EINTR || event.result == -EAGAIN) return false;
    if (event.result < 0) {
        transfer.fail(Failure::error, (int)-event.result, block.offset());
        return true;
    }
    const int64_t before = block.done;
    block.done += event.result;
    if (block.done < block.size) {
        if (transfer.direct) block.done -= block.done % ALIGNMENT;  // direct I/O goes on at a multiple
        if (block.done > before) return false;
        transfer.fail(Failure::ended, 0, block.offset());
        return true;
    }
    return true;
}

void Engine::finish(Block& block) {
    auto transfer = std::move(block.transfer);
    if (!transfer->write && !transfer->sums.empty() && !transfer->failed()) {
        const char* data = transfer->memory + block.begin;
        if (checksum(data, block.size) != transfer->sums[(size_t)(block.begin / block_)])
            transfer->fail(Failure::changed, 0, transfer->offset + block.begin);
    }
    block.used = false;
    transfer->finish_block();
}

void Engine::work(std::unique_ptr<Backend>& backend) {
    std::vector<Block> blocks(2 * (size_t)depth_);  // at the kernel, and come back from it
    try {
        serve(*backend, blocks);
    } catch (const std::exception& error) {  // the kernel's door itself is broken: nothing goes through it any more
        std::fprintf(stderr, "dscore-nvme: %s\n", error.what());
        backend.reset();
        for (auto& block : blocks)
            if (block.used) {
                block.transfer->fail(Failure::error, EIO, block.offset());
                block.transfer->finish_block();
            }
        for (Part part; take(part, true);) {
            part.transfer->fail(Failure::error, EIO, part.transfer->offset);
            part.transfer->finish_block();
        }
    }
}

// The kernel always has something to do while a checksum is made here: each block that is written is handed over before the
// next one's sum, and of blocks that have been read one is compared when others are under way again.
void Engine::serve(Backend& backend, std::vector<Block>& blocks) {
    std::vector<Event> events;
    std::deque<Block*> done;
    int under_way = 0;
    for (;;) {
        if (overlap_ || under_way == 0) {  // else a whole batch is done before the next one begins
            for (auto& block : blocks) {
                Part part;
                while (!block.used && under_way < depth_ && take(part, under_way == 0 && done.empty())) {
                    if (!begin(block, part)) continue;
                    backend.add(&block);
                    under_way++;
                    if (single_ || !block.transfer->sums.empty()) backend.submit(0, events);
                }
                if (!block.used) break;
            }
            if (under_way == 0 && done.empty()) return;  // closed, and nothing is left
        }
        if (events.empty() && under_way) backend.submit(!done.empty() ? 0 : overlap_ ? 1 : under_way, events);
        std::vector<Block*> again;
        for (const Event& event : events) {
            if (!advance(event)) {
                again.push_back(event.block);
                continue;
            }
            done.push_back(event.block);
            under_way--;
        }
        events.clear();
        for (Block* block : again) backend.add(block);
        if (!done.empty()) {
            finish(*done.front());
            done.pop_front();
        }
    }
}

}  // namespace ds
