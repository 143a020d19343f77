// A program as a table of ops, and its runs: one call for a step, in which threads share each op's units.
//
// [Note: barriers] Between two ops threads wait for each other only where one reads or overwrites a register that the
// other has written, or writes one that it has read; so queries, keys and values are one phase.
//
// [Note: shares] A thread first takes its own share of an op's units, which lie side by side, so that what it has
// asked for beyond a unit is what it reads next; then those that are left of other threads' shares.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "checks.h"
#include "tasks.h"
#include "team.h"
#include "weights.h"

namespace ds {
namespace inference {

// The kernels of the instruction set that was chosen.
inline const Table* chosen = nullptr;

constexpr long SOON = 192 << 10;      // bytes of weights, at most, that are asked for at a barrier
constexpr long AT_ONCE = 512;         // of them between two looks

class Program {
  public:
    Program(std::vector<long> widths, int output, bool bf16)
        : bf16_(bf16), widths_(std::move(widths)), output_(output), kept_(widths_.size()), registers_(widths_.size()) {}

    // Adds an op; fields that are left out are 0, registers -1.
    int add(int kind, const py::dict& fields) {
        ops_.emplace_back();
        Op& op = ops_.back();
        op = Op{};
        op.kind = kind;
        op.number = (long)ops_.size() - 1;
        const auto number = [&](const char* name, long otherwise) {
            return fields.contains(name) ? fields[name].cast<long>() : otherwise;
        };
        const auto real = [&](const char* name) { return fields.contains(name) ? fields[name].cast<float>() : 0.0f; };
        op.x = (int)number("x", -1);
        op.y = (int)number("y", -1);
        op.v = (int)number("v", -1);
        op.added = (int)number("added", -1);
        op.out = (int)number("out", -1);
        op.activation = (int)number("activation", 0);
        if (fields.contains("a")) op.a = weight(fields["a"]);
        if (fields.contains("b")) op.b = weight(fields["b"]);
        for (auto [name, to] : {std::pair{"bias", &op.bias}, {"second", &op.second}})
            if (fields.contains(name)) {
                const auto t = fields[name].cast<py::tuple>();
                *to = {address<const void>(t[0]), t[1].cast<int>()};
            }
        op.scale = real("scale");
        op.eps = real("eps");
        op.accumulate = number("accumulate", 0);
        op.layer_norm = number("layer_norm", 0);
        op.pairs = number("pairs", 0);
        op.causal = number("causal", 0);
        op.normalize = number("normalize", 0);
        op.by = (int)number("by", 0);
        op.offset = number("offset", 0);
        op.groups = number("groups", 1);
        op.head_dim = number("head_dim", 0);
        op.dims = number("dims", 0);
        op.positions = number("positions", 0);
        op.cos = reinterpret_cast<const float*>(number("cos", 0));
        op.sin = reinterpret_cast<const float*>(number("sin", 0));
        op.slopes = reinterpret_cast<const float*>(number("slopes", 0));
        op.heads = number("heads", 0);
        op.kv_heads = number("kv_heads", 0);
        op.layer = number("layer", -1);
        op.window = number("window", 0);
        op.first = number("first", 0);
        op.top_k = number("top_k", 0);
        for (auto [name, to] : {std::pair{"gates", &op.gates}, {"ups", &op.ups}, {"downs", &op.downs}})
            if (fields.contains(name)) {
                auto& all = weights_.emplace_back();
                for (auto w : fields[name]) all.push_back(weight(w));
                *to = all.data();
                op.experts = (long)all.size();
            }
        if (fields.contains("groups_of_heads")) {  // for each query head its key head
            const auto of = fields["groups_of_heads"].cast<std::vector<int>>();
            auto &order = numbers_.emplace_back(), &first = numbers_.emplace_back();
            for (int kv = 0; kv < op.kv_heads; kv++) {
                first.push_back((int)order.size());
                for (size_t h = 0; h < of.size(); h++)
                    if (of[h] == kv) order.push_back((int)h);
            }
            first.push_back((int)order.size());
            op.order = order.data();
            op.first_of = first.data();
        }
        op.unit = kind == LINEAR || kind == ROUTE ? unit_of(op.a)
                  : kind == GATED                     ? unit_of(op.a, 2)
                  : kind == EXPERTS_IN                ? unit_of(op.gates[0], 2)
                  : kind == EXPERTS_OUT               ? unit_of(op.downs[0])
                                                          : 0;
        if (kind == KEEP) kept_[(size_t)op.out] = true;
        else if (op.out >= 0 && op.x >= 0) kept_[(size_t)op.out] = kept_[(size_t)op.x];
        mark(op);
        return (int)op.number;
    }

    // Prepares a run; see `Run`. Addresses are 0 where something is not given.
    void begin(long rows, long wanted, const py::tuple& step, const py::tuple& cache, uintptr_t arena, uintptr_t output) {
        run_ = Run{};
        run_.rows = rows;
        run_.bf16 = bf16_;
        run_.wanted = wanted;
        size_t i = 0;
        for (auto to : {&run_.tokens, &run_.positions, &run_.types, &run_.starts, &run_.lengths, &run_.blocks})
            *to = address<const int>(step[i++]);
        run_.wants = address<const int64_t>(step[6]);
        run_.embeds = address<const float>(step[7]);
        run_.sequences = step[8].cast<long>();
        run_.blocks_stride = step[9].cast<long>();
        const long known_blocks = step[10].cast<long>();
        if (cache.size()) {
            run_.keys = address<char>(cache[0]);
            run_.values = address<char>(cache[1]);
            run_.cache_type = cache[2].cast<int>();
            run_.cache_blocks = cache[3].cast<long>();
        }
        float* at = reinterpret_cast<float*>(arena);
        for (size_t r = 0; r < widths_.size(); r++) {
            registers_[r] = (int)r == output_ && output ? reinterpret_cast<float*>(output) : at;
            if (registers_[r] == at) at += round_up(widths_[r] * rows, WIDEST);
        }
        run_.registers = registers_.data();
        run_.widths = widths_.data();
        flags_.assign(kept_.begin(), kept_.end());
        run_.kept = reinterpret_cast<const bool*>(flags_.data());
        check_step(run_, ops_, known_blocks);
        plan();
    }

    // Floats that registers take, but for `output` where it has memory of its own.
    long arena(long rows, bool with_output) const {
        long sum = 0;
        for (size_t r = 0; r < widths_.size(); r++)
            if (with_output || (int)r != output_) sum += round_up(widths_[r] * rows, WIDEST);
        return sum;
    }

    uintptr_t where(int reg) const { return reinterpret_cast<uintptr_t>(registers_.at((size_t)reg)); }
    long rows(int reg) const { return kept_.at((size_t)reg) ? run_.wanted : run_.rows; }

    // Runs ops first .. last - 1.
    void go(int first, int last, int threads) {
        py::gil_scoped_release release;
        const Table& table = *chosen;
        long most = 0;
        for (int o = first; o < last; o++) most = std::max(most, units_[(size_t)o]);
        threads = (int)std::min<long>(threads, most);
        for (int t = 0; t < threads; t++)
            for (int o = first; o < last; o++) taken(t, o).store(0, std::memory_order_relaxed);
        team(threads, [&](int me, int all) {
            Thread thread{aligned(rooms_[(size_t)me].data()), nullptr};
            bool owed = false;  // the barrier before an op that has nothing to do is left to the next one
            for (int o = first; o < last; o++) {
                const Op& op = ops_[(size_t)o];
                const long units = units_[(size_t)o];
                owed |= op.barrier && o > first;
                if (!units) continue;
                if (owed) barrier_.wait(all, next_weights(o, last, me, all));
                owed = false;
                for (int t = 0; t < all; t++) {
                    const int whose = (me + t) % all;
                    const long begin = units * whose / all, size = units * (whose + 1) / all - begin;
                    auto& next = taken(whose, o);
                    for (long u; next.load(std::memory_order_relaxed) < size &&
                                 (u = next.fetch_add(1, std::memory_order_relaxed)) < size;)
                        table.unit(op, run_, begin + u, thread);
                }
            }
        });
    }

    // What follows a product that torch has made for op `number`.
    void complete(int number, uintptr_t y, uintptr_t second, int type, int threads) {
        py::gil_scoped_release release;
        const Op& op = ops_.at((size_t)number);
        const long n = rows(op.x), width = widths_[(size_t)op.out], size = type == F32 ? 4 : 2;
        shared(n, threads, [&](long r) {
            const float* added = op.added < 0 ? nullptr : registers_[(size_t)op.added] + r * width;
            chosen->finish(op, reinterpret_cast<const char*>(y) + r * width * size,
                           second ? reinterpret_cast<const char*>(second) + r * width * size : nullptr, type, added,
                           registers_[(size_t)op.out] + r * width, width);
        });
    }

    // A register as `type`, contiguous.
    void narrow(int reg, uintptr_t to, int type, int threads) {
        py::gil_scoped_release release;
        constexpr long PIECE = 4096;
        const long n = rows(reg) * widths_.at((size_t)reg);
        shared((n + PIECE - 1) / PIECE, threads, [&](long i) {
            chosen->narrow(reinterpret_cast<char*>(to) + i * PIECE * (type == F32 ? 4 : 2),
                           registers_[(size_t)reg] + i * PIECE, type, std::min(PIECE, n - i * PIECE));
        });
    }

    // Room for so many threads.
    void reserve(int threads) {
        if ((int)rooms_.size() < threads) {
            rooms_.resize((size_t)threads);
            taken_ = std::make_unique<std::atomic<long>[]>((size_t)threads * ops_.size());
        }
        for (auto& room : rooms_)
            if ((long)room.size() < room_ + WIDEST) room.resize((size_t)(room_ + WIDEST));
    }

    bool has_barrier(int number) const { return ops_.at((size_t)number).barrier; }

  private:
    // fn(me, all) on `threads` threads; makes sure that each has its room.
    template <class Fn>
    static void team(int threads, const Fn& fn) {
#ifdef _OPENMP
        if (threads > 1) {
#pragma omp parallel num_threads(threads)
            fn(omp_get_thread_num(), omp_get_num_threads());
            return;
        }
#endif
        fn(0, 1);
    }

    template <class Fn>
    static void shared(long n, int threads, const Fn& fn) {
        std::atomic<long> next{0};
        team((int)std::min<long>(threads, n), [&](int, int) {
            for (long i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) fn(i);
        });
    }

    // How many of thread `t`'s share of op `o` are taken.
    std::atomic<long>& taken(int t, int o) { return taken_[(size_t)t * ops_.size() + (size_t)o]; }

    // While others are waited for: the beginning of the thread's share of the next product's weights, from op `o` on.
    struct Soon {
        const char* at;
        long size;

        bool operator()(long i) const {
            if ((i + 1) * AT_ONCE > size) return false;
            for (long k = i * AT_ONCE; k < (i + 1) * AT_ONCE; k += 64) __builtin_prefetch(at + k, 0, 2);
            return true;
        }
    };

    Soon next_weights(int o, int last, int me, int all) const {
        while (o < last && ops_[(size_t)o].kind != LINEAR && ops_[(size_t)o].kind != GATED) o++;
        if (o == last || ops_[(size_t)o].a.columns) return {nullptr, 0};
        const Op& op = ops_[(size_t)o];
        const long units = units_[(size_t)o], first = units * me / all * op.unit, end = units * (me + 1) / all * op.unit;
        return {op.a.data + first * row_bytes(op.a), std::min(SOON, (std::min(end, op.a.out) - first) * row_bytes(op.a))};
    }

    // Decides whether a barrier is needed before `op`. The cache counts as a register, -2.
    void mark(Op& op) {
        std::set<int> reads, writes;
        for (int r : {op.x, op.y, op.v, op.added})
            if (r >= 0) reads.insert(r);
        if (op.out >= 0) writes.insert(op.out);
        if (op.kind == ROTATE) writes.insert(op.x);
        if (op.kind == EMBED && op.accumulate) reads.insert(op.out);
        if (op.kind == STORE) writes.insert(-2);
        if (op.kind == ATTEND) reads.insert(-2);
        const auto meet = [](const std::set<int>& a, const std::set<int>& b) {
            return std::any_of(a.begin(), a.end(), [&](int r) { return b.count(r) > 0; });
        };
        op.barrier = meet(reads, written_) || meet(writes, written_) || meet(writes, read_);
        if (op.barrier) {
            written_.clear();
            read_.clear();
            phase_++;
        }
        op.phase = phase_;
        written_.insert(writes.begin(), writes.end());
        read_.insert(reads.begin(), reads.end());
    }

    // Units of each op, tasks of attention, rows to be stored, and room.
    void plan() {
        const long n = run_.rows;
        tasks_.clear();
        task_lists_.assign(ops_.size(), nullptr);
        finished_lists_.assign(ops_.size(), nullptr);
        units_.assign(ops_.size(), 0);
        stores_ = rows_to_store(run_);
        run_.store_rows = stores_.data();
        run_.store_count = (long)stores_.size() / 3;
        std::map<std::tuple<long, bool, bool, long, long>, Tasks*> known;
        size_t finished = 0;
        long partials = 0, room = 0;
        std::vector<std::pair<size_t, size_t>> places;
        for (const Op& op : ops_) {
            const size_t o = (size_t)op.number;
            const long m = op.x >= 0 ? rows(op.x) : n;
            long& units = units_[o];
            switch (op.kind) {
                case LINEAR:
                case GATED:
                    units = (op.a.out + op.unit - 1) / op.unit;
                    room = std::max(room, room_of(op.a, op.unit, m));
                    break;
                case EXPERTS_IN:
                    units = (op.gates[0].out + op.unit - 1) / op.unit * op.experts;
                    room = std::max(room, room_of(op.gates[0], op.unit, m));
                    break;
                case EXPERTS_OUT:
                    units = (op.downs[0].out + op.unit - 1) / op.unit;
                    room = std::max(room, room_of(op.downs[0], op.unit, m));
                    break;
                case ROUTE:
                    units = m;
                    room = std::max(room, room_of(op.a, op.a.out, 1));
                    break;
                case STORE: units = op.layer >= 0 ? run_.store_count : 0; break;
                case KEEP: units = run_.wanted; break;
                case ATTEND: {
                    const bool cached = run_.keys && op.layer >= 0;
                    auto& list = known[{op.window, cached, op.causal, op.heads, op.head_dim}];
                    if (!list) list = tasks_.emplace_back(std::make_unique<Tasks>(divide(op, run_, cached))).get();
                    task_lists_[o] = list->tasks.data();
                    units = (long)list->tasks.size() * op.kv_heads;
                    places.emplace_back(o, finished);
                    finished += (size_t)(list->groups * op.kv_heads);
                    partials = std::max(partials, list->partials);
                    const long wide = round_up(op.head_dim, WIDEST), queries = CHUNK * op.heads;
                    room = std::max(room, 2 * BLOCK_TOKENS * wide + queries * (2 * wide + 2));
                    break;
                }
                default:
                    units = m;
                    room = std::max(room, 2 * widths_[(size_t)(op.out >= 0 ? op.out : op.x)]);
            }
        }
        finished_.assign(finished, 0);
        for (auto [o, at] : places) finished_lists_[o] = finished_.data() + at;
        if ((long)partials_.size() < partials) partials_.resize((size_t)partials);
        run_.tasks = task_lists_.data();
        run_.finished = finished_lists_.data();
        run_.partials = partials_.data();
        room_ = std::max(room_, round_up(room, WIDEST));
    }

    static float* aligned(float* room) { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room) + 63) / 64 * 64); }

    const bool bf16_;
    std::vector<long> widths_;
    const int output_;
    std::vector<bool> kept_;
    std::vector<char> flags_;
    std::vector<float*> registers_;
    std::deque<Op> ops_;
    std::deque<std::vector<Weight>> weights_;
    std::deque<std::vector<int>> numbers_;
    std::set<int> written_, read_;
    long phase_ = 0;

    Run run_{};
    std::unique_ptr<std::atomic<long>[]> taken_;
    std::vector<long> units_;
    std::vector<std::unique_ptr<Tasks>> tasks_;
    std::vector<const Task*> task_lists_;
    std::vector<int*> finished_lists_;
    std::vector<int> finished_, stores_;
    std::vector<float> partials_;
    std::vector<std::vector<float>> rooms_;
    long room_ = 0;
    Barrier barrier_;
};

}  // namespace inference
}  // namespace ds
