// Collectives through memory that all ranks of a group have mapped (Linux).
//
// Each rank has two boxes, used by turns, and a stage: a number that only it raises. A round is: fill my box, raise my
// stage, wait until every other rank's stage is as high, read their boxes. All ranks go through the same rounds, so
// stages need no names. [Note: two boxes are enough] I fill the box of round s again in round s + 2, after I have seen
// every other rank reach round s + 1, which it did after it had read my box of round s.
#include <pybind11/pybind11.h>

#include "fold_table.h"

#ifdef __linux__

#include "rings.h"

namespace py = pybind11;
using namespace ds::shared;

namespace {

// Those this processor can run, best first.
std::vector<std::pair<const char*, ds::Fold>> folds() {
    std::vector<std::pair<const char*, ds::Fold>> usable;
#ifdef DS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        usable.emplace_back("avx512", ds::fold_avx512);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        usable.emplace_back("avx2", ds::fold_avx2);
#endif
    usable.emplace_back("generic", ds::fold_generic);
    return usable;
}

class Segment : public Rings {
  public:
    static constexpr int MOST = 64;

    // As `Memory`; sums are by the best instruction set of this processor.
    Segment(int descriptor, const std::string& key, int rank, int size, size_t box, size_t ring, double timeout,
            long spin_ns)
        : Rings(descriptor, key, rank, size, box, ring, timeout, spin_ns), fold_(folds().front().second) {}

    // Begins a collective that this thread alone runs; `text` and `tag` must be every rank's.
    uint32_t all_reduce(uint64_t tag, const std::string& text, bool interruptible, uintptr_t data, long n, int width,
                        int type, int op, bool average, long once) {
        return guarded(tag, text, interruptible, [&] {
            const long step = (long)box_ / width;
            for (long begin = 0; begin < n; begin += step) {
                char* mine = (char*)data + begin * width;
                const long m = std::min(step, n - begin);
                if (m * width <= once) reduce_once(mine, m, width, type, op, average);
                else reduce_parted(mine, m, width, type, op, average);
            }
        });
    }

    // in[r]: this rank's sizes[r] elements for rank r; out: this rank's own part of the reduction.
    uint32_t reduce_scatter(uint64_t tag, const std::string& text, bool interruptible, uintptr_t out,
                            const std::vector<uintptr_t>& in, const std::vector<long>& sizes, int width, int type,
                            int op, bool average) {
        if ((int)in.size() != size_ || (int)sizes.size() != size_) throw py::value_error("one part for each rank");
        return guarded(tag, text, interruptible, [&] {
            const long step = (long)box_ / width / size_ / 8 * 8, most = *std::max_element(sizes.begin(), sizes.end());
            std::vector<const void*> parts((size_t)size_);
            for (long begin = 0; begin < most; begin += step) {
                auto there = [&](int r) { return std::max(0L, std::min(step, sizes[(size_t)r] - begin)); };
                auto row = [&](int r) { return (const char*)in[(size_t)r] + begin * width; };
                char* box = enter();
                for (int d = 1; d < size_; d++) {
                    const int r = (rank_ + d) % size_;
                    memcpy(box + r * step * width, row(r), (size_t)(there(r) * width));
                }
                publish();
                wait_all();
                for (int r = 0; r < size_; r++)
                    parts[(size_t)r] = r == rank_ ? row(r) : this->box(r) + rank_ * step * width;
                if (there(rank_))
                    fold_((char*)out + begin * width, parts.data(), size_, there(rank_), type, op, average);
            }
        });
    }

    // parts[r]: where rank r's sizes[r] bytes go.
    uint32_t all_gather(uint64_t tag, const std::string& text, bool interruptible, const std::vector<uintptr_t>& parts,
                        const std::vector<long>& sizes, uintptr_t mine) {
        if ((int)parts.size() != size_ || (int)sizes.size() != size_) throw py::value_error("one part for each rank");
        return guarded(tag, text, interruptible, [&] {
            const long most = *std::max_element(sizes.begin(), sizes.end());
            for (long begin = 0; begin < most; begin += (long)box_) {
                auto there = [&](int r) { return (size_t)std::max(0L, std::min((long)box_, sizes[r] - begin)); };
                char* box = enter();
                memcpy(box, (const char*)mine + begin, there(rank_));
                publish();
                if (parts[(size_t)rank_] != mine)
                    memcpy((char*)parts[(size_t)rank_] + begin, (const char*)mine + begin, there(rank_));
                for (int d = 1; d < size_; d++) {
                    const int r = (rank_ + d) % size_;
                    wait_for(r);
                    memcpy((char*)parts[(size_t)r] + begin, this->box(r), there(r));
                }
            }
        });
    }

    // What `rank` said of the collective in which the ranks parted.
    std::string call_of(int rank) const {
        if (!base_ || rank < 0 || rank >= size_) throw py::value_error("no such rank");
        const char* text = control(rank).calls[(round_ + 1) % 2].text;
        return std::string(text, strnlen(text, TEXT));
    }

  private:
    // The box of rank `r` in the round that `enter` began.
    char* box(int r) const { return boxes() + ((size_t)r * 2 + (round_ + 1) % 2) * box_; }

    // Runs a collective without the interpreter's lock; the failure's code and rank, or 0.
    template <class Fn>
    uint32_t guarded(uint64_t tag, const std::string& text, bool interruptible, const Fn& run) {
        if (!base_) throw std::runtime_error("the segment is closed");
        if (const uint32_t before = control(rank_).failure.load()) return before;
        tag_ = tag;
        text_ = &text;
        interruptible_ = interruptible;
        Failed failed = {OK, 0};
        {
            py::gil_scoped_release release_gil;
            try {
                run();
            } catch (const Failed& why) {
                failed = why;
                fail(why);
            }
        }
        if (failed.code == INTERRUPTED) throw py::error_already_set();
        return failed.code | (uint32_t)failed.rank << 8;
    }

    // Begins a round; my box of it. A collective's first round says which collective it is.
    char* enter() {
        const unsigned turn = round_++ % 2;
        if (text_) {
            Call& call = control(rank_).calls[turn];
            call.tag = tag_;
            call.digest = digest_of(*text_);
            memset(call.text, 0, TEXT);
            memcpy(call.text, text_->data(), std::min(text_->size(), TEXT));
        }
        compare_ = text_ != nullptr;
        text_ = nullptr;
        return box(rank_);
    }

    void publish() {
        Control& mine = control(rank_);
        mine.stage.store(++stage_);
        wake(mine.stage, mine.sleepers);
    }

    bool reached(int r) const { return (int32_t)(control(r).stage.load() - stage_) >= 0; }

    void wait_all() {
        for (int d = 1; d < size_; d++) wait_for((rank_ + d) % size_);
    }

    void wait_for(int r) {
        if (!reached(r)) wait_long(r);
        if (compare_) compare(r);
    }

    void wait_long(int r) {
        const long begin = now_ns();
        while (spin_ns_ && now_ns() - begin < spin_ns_)
            for (int i = 0; i < 32; i++) {
                if (reached(r)) return;
                pause_briefly();
            }
        Control& theirs = control(r);
        for (long checked = begin;;) {
            theirs.sleepers.store(1);
            const uint32_t seen = theirs.stage.load();
            if (reached(r)) return;
            const timespec nap = {0, CHECK_NS};
            syscall(SYS_futex, (uint32_t*)&theirs.stage, FUTEX_WAIT, seen, &nap, nullptr, 0);
            if (reached(r)) return;
            if (const long now = now_ns(); now - checked >= CHECK_NS) {
                look(r, now - begin);
                checked = now;
            }
        }
    }

    // Of those that have not come: is one gone, or has one given up? Their stage is read after that, as they may have
    // come before they went.
    void look(int waits_for, long waited) {
        for (int r = 0; r < size_; r++) {
            if (r == rank_ || reached(r)) continue;
            const uint32_t failure = control(r).failure.load();
            const bool away = gone(r);
            if (reached(r) || !(failure || away)) continue;
            const uint32_t code = failure & 0xff;
            if (code == GONE || code == LATE) throw Failed{code, (int)(failure >> 8)};  // what made it give up
            throw Failed{code == 0 || away ? (uint32_t)(code == LEFT ? LEFT : GONE) : code, r};
        }
        if (waited > timeout_ns_) throw Failed{LATE, waits_for};
        if (interruptible_) {
            py::gil_scoped_acquire gil;
            if (PyErr_CheckSignals()) throw Failed{INTERRUPTED, rank_};
        }
    }

    // Ranks that call different collectives must not read each other's boxes. With the guard on, one that differs for
    // the guard has not come: the guard ends the job, saying more than could be said here.
    void compare(int r) {
        const unsigned turn = (round_ + 1) % 2;
        const Call &mine = control(rank_).calls[turn], &theirs = control(r).calls[turn];
        if (mine.tag != theirs.tag && mine.tag && theirs.tag)
            for (long begin = now_ns();;) {
                usleep(50'000);
                if (gone(r)) throw Failed{GONE, r};
                if (const uint32_t failure = control(r).failure.load()) throw Failed{failure & 0xff, r};
                if (now_ns() - begin > timeout_ns_) throw Failed{LATE, r};
            }
        if (mine.digest != theirs.digest) throw Failed{DIFFERENT, r};
    }

    // Small: everybody adds everything up.
    void reduce_once(char* mine, long n, int width, int type, int op, bool average) {
        memcpy(enter(), mine, (size_t)(n * width));
        publish();
        wait_all();
        fold_from(mine, mine, 0, n, width, type, op, average);
    }

    // Each rank adds up its part and shows the others the result, in its box.
    void reduce_parted(char* mine, long n, int width, int type, int op, bool average) {
        auto start = [&](int r) { return std::min(n, (n * r / size_ + 63) / 64 * 64); };
        auto end = [&](int r) { return r + 1 == size_ ? n : start(r + 1); };
        char* box = enter();
        const long first = start(rank_), last = end(rank_);
        memcpy(box, mine, (size_t)(first * width));
        memcpy(box + last * width, mine + last * width, (size_t)((n - last) * width));
        publish();
        wait_all();
        constexpr long PIECE = 4096;  // elements: the copy comes from the cache
        for (long i = first; i < last; i += PIECE) {
            const long m = std::min(PIECE, last - i);
            fold_from(mine + i * width, mine + i * width, i, m, width, type, op, average);
            memcpy(box + i * width, mine + i * width, (size_t)(m * width));
        }
        compare_ = false;
        publish();
        for (int d = 1; d < size_; d++) {
            const int r = (rank_ + d) % size_;
            wait_for(r);
            memcpy(mine + start(r) * width, this->box(r) + start(r) * width, (size_t)((end(r) - start(r)) * width));
        }
    }

    void fold_from(char* out, const char* mine, long offset, long n, int width, int type, int op, bool average) {
        const void* parts[MOST];
        for (int r = 0; r < size_; r++) parts[r] = r == rank_ ? mine : box(r) + offset * width;
        fold_(out, parts, size_, n, type, op, average);
    }

    ds::Fold fold_;
    uint32_t stage_ = 0;
    unsigned round_ = 0;
    uint64_t tag_ = 0;
    const std::string* text_ = nullptr;
    bool compare_ = false, interruptible_ = false;
};

template <class T>
std::vector<T> numbers(const py::list& list) {
    std::vector<T> out;
    for (auto item : list) out.push_back(item.cast<T>());
    return out;
}

uint32_t reduce_scatter(Segment& segment, uint64_t tag, const std::string& text, bool interruptible, uintptr_t out,
                        py::list in, py::list sizes, int width, int type, int op, bool average) {
    return segment.reduce_scatter(tag, text, interruptible, out, numbers<uintptr_t>(in), numbers<long>(sizes), width,
                                  type, op, average);
}

uint32_t all_gather(Segment& segment, uint64_t tag, const std::string& text, bool interruptible, py::list parts,
                    py::list sizes, uintptr_t mine) {
    return segment.all_gather(tag, text, interruptible, numbers<uintptr_t>(parts), numbers<long>(sizes), mine);
}

void fold(const std::string& name, uintptr_t out, py::list parts, long n, int type, int op, bool average) {
    std::vector<const void*> from;
    for (auto part : parts) from.push_back((const void*)part.cast<uintptr_t>());
    for (auto& [known, function] : folds())
        if (name == known) return function((void*)out, from.data(), (int)from.size(), n, type, op, average);
    throw py::value_error("this processor cannot run " + name);
}

}  // namespace

void register_shared(py::module_& m) {
    py::class_<Segment>(m, "Segment")
        .def(py::init<int, const std::string&, int, int, size_t, size_t, double, long>())
        .def_static("bytes_for", &Segment::bytes_for)
        .def_static("ring_bytes_for", &Segment::ring_bytes_for)
        .def("all_reduce", &Segment::all_reduce)
        .def("reduce_scatter", &reduce_scatter)
        .def("all_gather", &all_gather)
        .def("put", &Segment::put)
        .def("next", &Segment::next)
        .def("get", &Segment::get)
        .def("taken", &Segment::taken)
        .def("await_bytes", &Segment::await_bytes)
        .def("await_room", &Segment::await_room)
        .def("lost", &Segment::lost)
        .def("call_of", &Segment::call_of)
        .def("leave", &Segment::leave);
    m.def("fold", &fold, "For tests: the reduction alone, by the instruction set of that name.");
    m.attr("MOST_RANKS") = Segment::MOST;
}

#else

void register_shared(pybind11::module_&) {}

#endif
