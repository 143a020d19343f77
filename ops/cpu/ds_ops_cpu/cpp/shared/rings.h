// Messages between two ranks through shared memory.
//
// [Note: rings] Messages of two ranks go through a ring for each direction: a stream of bytes, each message's length
// before it. Only the sender raises `written`, only the receiver `taken`. Pages of rings that nobody uses are not there.
#pragma once

#include "memory.h"

namespace ds {
namespace shared {

class Rings : public Memory {
  public:
    using Memory::Memory;

    // Messages. One thread at a time sends to a rank, and one receives from a rank; none of these blocks but `await_`s.

    // Puts as many of `n` bytes into the ring to `to` as there is room for; how many. Their length goes before them if
    // `first`; -1 when there is no room even for that.
    long put(int to, uintptr_t data, long n, bool first) {
        Ring& r = ring(rank_, to);
        py::gil_scoped_release release_gil;
        uint32_t at = r.written.load();
        size_t room = ring_ - (uint32_t)(at - r.taken.load());
        if (first) {
            if (room < sizeof(int64_t)) return -1;
            const int64_t length = n;
            write(r, at, (const char*)&length, sizeof length);
            at += (uint32_t)sizeof length;
            room -= sizeof length;
        }
        const size_t count = std::min(room, (size_t)n);
        write(r, at, (const char*)data, count);
        if (count || first) {
            r.written.store(at + (uint32_t)count);
            wake(r.written, r.reader_sleeps);
        }
        return (long)count;
    }

    // The length of the next message from `from`, which `get` then gives; -1 when none has begun to arrive.
    long next(int from) {
        int64_t length = -1;
        Ring& r = ring(from, rank_);
        if ((uint32_t)(r.written.load() - r.taken.load()) >= sizeof length) take(r, (char*)&length, sizeof length);
        return (long)length;
    }

    // Takes as many of `n` bytes as have arrived; how many.
    long get(int from, uintptr_t out, long n) {
        py::gil_scoped_release release_gil;
        Ring& r = ring(from, rank_);
        const size_t count = std::min((size_t)n, (size_t)(uint32_t)(r.written.load() - r.taken.load()));
        if (count) take(r, (char*)out, count);
        return (long)count;
    }

    // How many bytes have been taken from `from`.
    uint32_t taken(int from) { return ring(from, rank_).taken.load(); }

    // Waits, a tenth of a second at most, until more than `taken` bytes have come from `from`.
    void await_bytes(int from, uint32_t taken) {
        Ring& r = ring(from, rank_);
        doze(r.written, r.reader_sleeps, [&] { return r.written.load() != taken; });
    }

    // Waits, a tenth of a second at most, until there is room for `n` bytes.
    void await_room(int to, long n) {
        Ring& r = ring(rank_, to);
        doze(r.taken, r.writer_sleeps,
             [&] { return ring_ - (uint32_t)(r.written.load() - r.taken.load()) >= (size_t)n; });
    }

  private:
    Ring& ring(int from, int to) const {
        if (!base_ || from < 0 || to < 0 || from >= size_ || to >= size_ || from == to)
            throw py::value_error("no such ring");
        return *(Ring*)(rings_ + (size_t)(from * size_ + to) * (RING_HEAD + ring_));
    }

    void write(Ring& r, uint32_t at, const char* data, size_t n) const {
        const size_t begin = at & (ring_ - 1), head = std::min(n, ring_ - begin);
        char* bytes = (char*)&r + RING_HEAD;
        memcpy(bytes + begin, data, head);
        memcpy(bytes, data + head, n - head);
    }

    void take(Ring& r, char* out, size_t n) const {
        const uint32_t at = r.taken.load();
        const size_t begin = at & (ring_ - 1), head = std::min(n, ring_ - begin);
        const char* bytes = (const char*)&r + RING_HEAD;
        memcpy(out, bytes + begin, head);
        memcpy(out + head, bytes, n - head);
        r.taken.store(at + (uint32_t)n);
        wake(r.taken, r.writer_sleeps);
    }

    // Once; whether `ready` the caller sees by itself.
    template <class Ready>
    void doze(std::atomic<uint32_t>& number, std::atomic<uint32_t>& sleeps, const Ready& ready) const {
        py::gil_scoped_release release_gil;
        for (const long begin = now_ns(); spin_ns_ && now_ns() - begin < spin_ns_;)
            for (int i = 0; i < 32; i++) {
                if (ready()) return;
                pause_briefly();
            }
        sleeps.store(1);
        const uint32_t seen = number.load();
        if (ready()) return;
        const timespec nap = {0, CHECK_NS};
        syscall(SYS_futex, (uint32_t*)&number, FUTEX_WAIT, seen, &nap, nullptr, 0);
    }
};

}  // namespace shared
}  // namespace ds
