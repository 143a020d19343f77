// The limit that benchmarks/nvme.py measures against: one thread keeps `depth` blocks of one file at the kernel, from and
// to memory that is registered with the ring, and does nothing else.
#include <linux/io_uring.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace {

struct Ring {
    int file;
    char *submissions, *completions, *memory;
    io_uring_sqe* entries;
    io_uring_params params;

    uint32_t* at(char* ring, uint32_t offset) const { return (uint32_t*)(ring + offset); }
};

long enter(const Ring& ring, unsigned submit, unsigned wait) {
    return syscall(__NR_io_uring_enter, ring.file, submit, wait, IORING_ENTER_GETEVENTS, nullptr, 0);
}

char* map(const Ring& ring, size_t size, uint64_t offset) {
    return (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.file, (off_t)offset);
}

}  // namespace

// nullptr: errno says why not.
extern "C" void* open_ring(unsigned depth, char* memory, uint64_t nbytes) {
    auto* ring = new Ring{};
    ring->memory = memory;
    ring->params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    ring->file = (int)syscall(__NR_io_uring_setup, depth, &ring->params);
    if (ring->file < 0) return nullptr;
    const auto& p = ring->params;
    ring->submissions = map(*ring, p.sq_off.array + p.sq_entries * 4, IORING_OFF_SQ_RING);
    ring->completions = map(*ring, p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
    ring->entries = (io_uring_sqe*)map(*ring, p.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    const iovec all{memory, nbytes};
    if (syscall(__NR_io_uring_register, ring->file, IORING_REGISTER_BUFFERS, &all, 1) < 0) return nullptr;
    return ring;
}

// Moves the first `nbytes` once; 0, or an errno.
extern "C" int move(void* handle, int file, bool write, uint64_t nbytes, uint32_t block, unsigned depth) {
    Ring& ring = *(Ring*)handle;
    const auto& p = ring.params;
    uint32_t* tail = ring.at(ring.submissions, p.sq_off.tail);
    uint32_t* array = ring.at(ring.submissions, p.sq_off.array);
    const uint32_t mask = *ring.at(ring.submissions, p.sq_off.ring_mask);
    uint32_t* head = ring.at(ring.completions, p.cq_off.head);
    uint32_t* done = ring.at(ring.completions, p.cq_off.tail);
    const uint32_t done_mask = *ring.at(ring.completions, p.cq_off.ring_mask);
    const auto* found = (io_uring_cqe*)(ring.completions + p.cq_off.cqes);
    uint64_t begin = 0;
    unsigned under_way = 0, fresh = 0;
    int error = 0;
    while (begin < nbytes || under_way) {
        for (; begin < nbytes && under_way < depth; begin += block, under_way++, fresh++) {
            const uint32_t slot = *tail & mask;
            io_uring_sqe& entry = ring.entries[slot];
            memset(&entry, 0, sizeof entry);
            entry.opcode = write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
            entry.fd = file;
            entry.off = begin;
            entry.addr = (uint64_t)(ring.memory + begin);
            entry.len = block;
            array[slot] = slot;
            __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
        }
        const long taken = enter(ring, fresh, 1);
        if (taken < 0 && errno != EINTR) return errno;
        if (taken > 0) fresh -= (unsigned)taken;
        uint32_t at = *head;
        for (; at != __atomic_load_n(done, __ATOMIC_ACQUIRE); at++, under_way--)
            if (found[at & done_mask].res != (int32_t)block) error = found[at & done_mask].res < 0 ? -found[at & done_mask].res : EIO;
        __atomic_store_n(head, at, __ATOMIC_RELEASE);
    }
    return error;
}
