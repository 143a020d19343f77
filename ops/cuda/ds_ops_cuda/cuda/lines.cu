// Instructions of inference programs that go over rows: embedding, norms, rotary embeddings, the cache, sums, copies.

#include "eight.h"

namespace ds {
namespace {

constexpr int kBlock = 32;  // tokens of a block of the cache: ds_inference_kit.step.BLOCK

// Calls work(row, column) for all of [rows, width], neighbours in a row by neighbouring threads.
template <class Work>
__global__ void __launch_bounds__(kThreads) each_kernel(int64_t rows, int64_t width, Work work) {
  int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < rows * width; i += stride) {
    work(i / width, i % width);
  }
}

template <class Work>
void each(const char* what, Address stream, int64_t rows, int64_t width, const Work& work) {
  if (rows * width == 0) return;
  int64_t blocks = (rows * width + kThreads - 1) / kThreads;
  each_kernel<<<static_cast<unsigned>(min(blocks, int64_t{1} << 16)), kThreads, 0, queue(stream)>>>(rows, width, work);
  check_launch(what);
}

struct Embedding {
  Lines out;
  const int32_t* index;  // null: 0 for each row
  const void *table, *embeds;
  int table_type;
  int64_t width, entries, offset;
  float scale;
  bool add;

  __device__ void operator()(int64_t row, int64_t col) const {
    float x;
    if (embeds) {
      x = load_one(embeds, out.type, row * width + col);
    } else {
      int64_t line = (index ? index[row] : 0) + offset;
      // No such line: NaN, which shows, where reading would be of any memory.
      bool there = line >= 0 && line < entries;
      x = there ? load_one(table, table_type, line * width + col) * scale : __uint_as_float(0x7fc00000u);
    }
    out.set(row, col, add ? out.get(row, col) + x : x);
  }
};

struct Addition {
  Lines x, y, out;
  const void* bias;
  int bias_type;

  __device__ void operator()(int64_t row, int64_t col) const {
    float b = bias ? load_one(bias, bias_type, col) : 0.0f;
    out.set(row, col, x.get(row, col) + y.get(row, col) + b);
  }
};

struct Cut {  // columns of each part of a row
  Lines x, out;
  int64_t first, part, width;  // part: columns of x from one to the next; width: columns that are taken

  __device__ void operator()(int64_t row, int64_t col) const {
    out.set(row, col, x.get(row, col / width * part + first + col % width));
  }
};

struct Kept {
  Lines x, out;
  const int64_t* wanted;  // null: all
  int64_t rows;  // of x

  __device__ void operator()(int64_t row, int64_t col) const {
    int64_t from = wanted ? wanted[row] : row;
    out.set(row, col, from >= 0 && from < rows ? x.get(from, col) : __uint_as_float(0x7fc00000u));
  }
};

// [Note: from the chip's own memory] A row is read three times at most; but for the first time it comes from the cache.
template <int kTeam>
__global__ void __launch_bounds__(kThreads) normalize_kernel(Lines x, Lines out, int64_t rows, int64_t groups,
                                                              int64_t cols, const void* weight, int weight_type,
                                                              const void* bias, int bias_type, float eps, bool layer) {
  int64_t number = team_row<kTeam>();
  if (number >= rows * groups) return;  // the whole team
  int64_t row = number / groups, first = number % groups * cols;
  float mean = 0.0f, squares = 0.0f;
  if (layer) {
    for (int64_t col = team_rank<kTeam>(); col < cols; col += kTeam) mean += x.get(row, first + col);
    mean = combine<kTeam>(mean, Add()) / static_cast<float>(cols);
  }
  for (int64_t col = team_rank<kTeam>(); col < cols; col += kTeam) {
    float centred = x.get(row, first + col) - mean;
    squares += centred * centred;
  }
  float factor = 1.0f / sqrtf(combine<kTeam>(squares, Add()) / static_cast<float>(cols) + eps);
  for (int64_t col = team_rank<kTeam>(); col < cols; col += kTeam) {
    float y = (x.get(row, first + col) - mean) * factor;
    if (weight) y *= load_one(weight, weight_type, col);
    if (bias) y += load_one(bias, bias_type, col);
    out.set(row, first + col, y);
  }
}

struct Turning {
  Lines x;
  int64_t head_dim, pairs, all_pairs;  // of a head; of a row
  const float *cos, *sin;
  int64_t positions;
  bool halves;
};

// The place of a row's new token in the cache.
struct CacheWrite {
  char *keys, *values;  // null: no cache
  int type;
  int64_t heads, head_dim, most, first_block, blocks;
  const int32_t *sequence, *limit, *table;

  __device__ void put(char* arena, int64_t row, int64_t col, float x) const {
    int64_t at = limit[row] - 1;
    if (at >= most * kBlock) return;
    int64_t block = table[sequence[row] * most + at / kBlock];
    if (block < 0 || block >= blocks) return;
    int64_t line = ((first_block + block) * heads + col / head_dim) * kBlock + at % kBlock;
    store_one(arena, type, line * head_dim + col % head_dim, x);
  }
};

// Of each row: pairs of up to two registers turn, then keys and values go into the cache. Keys go there as they turn.
struct Placing {
  Turning of[2];
  int turns, of_k;  // which of them is the keys', or -1
  const int32_t* positions;
  Lines k, v;
  CacheWrite cache;

  __device__ void operator()(int64_t row, int64_t item) const {
    for (int t = 0; t < turns; ++t) {
      if (item < of[t].all_pairs) {
        turn(of[t], row, item, t == of_k);
        return;
      }
      item -= of[t].all_pairs;
    }
    int64_t turned = of_k < 0 ? 0 : 2 * of[of_k].pairs, rest = cache.head_dim - turned;
    if (item < cache.heads * rest) {
      int64_t col = item / rest * cache.head_dim + turned + item % rest;
      cache.put(cache.keys, row, col, k.get(row, col));
    } else {
      int64_t col = item - cache.heads * rest;
      cache.put(cache.values, row, col, v.get(row, col));
    }
  }

  __device__ void turn(const Turning& t, int64_t row, int64_t pair, bool into_cache) const {
    int64_t position = positions[row], head = pair / t.pairs, i = pair % t.pairs;
    bool there = position >= 0 && position < t.positions;
    float none = __uint_as_float(0x7fc00000u);
    float cos = there ? t.cos[position * t.pairs + i] : none, sin = there ? t.sin[position * t.pairs + i] : none;
    int64_t first = head * t.head_dim + (t.halves ? i : 2 * i), second = first + (t.halves ? t.pairs : 1);
    float a = t.x.get(row, first), b = t.x.get(row, second);
    float x = a * cos - b * sin, y = b * cos + a * sin;
    t.x.set(row, first, x);
    t.x.set(row, second, y);
    if (into_cache) {
      cache.put(cache.keys, row, first, rounded(t.x.type, x));
      cache.put(cache.keys, row, second, rounded(t.x.type, y));
    }
  }
};

int64_t rows_of(const Frame& f, bool kept) { return kept ? f.kept : f.rows; }

const int32_t* ints(Address address) { return reinterpret_cast<const int32_t*>(address); }

}  // namespace

Launch embed(int out, int64_t width, Vector table, int64_t entries, int by, int64_t offset, double scale, bool add) {
  return [=](const Frame& f, Address stream) {
    const Address indices[] = {f.tokens, f.positions, f.types};
    const void* embeds = by == 0 ? in(f.embeds) : nullptr;
    each("embed", stream, f.rows, width,
         Embedding{lines(f, out), ints(indices[by]), in(table.first), embeds, table.second, width, entries, offset,
                   float(scale), add});
  };
}

Launch normalize(int x, int out, int64_t width, int64_t groups, Vector weight, Vector bias, double eps, bool layer,
                 bool kept) {
  return [=](const Frame& f, Address stream) {
    int64_t rows = rows_of(f, kept), cols = width / groups;
    if (rows * cols == 0) return;
    auto run = [&](auto kernel, int team) {
      kernel<<<static_cast<unsigned>(blocks_for(rows * groups, team)), kThreads, 0, queue(stream)>>>(
          lines(f, x), lines(f, out), rows, groups, cols, in(weight.first), weight.second, in(bias.first), bias.second,
          float(eps), layer);
    };
    if (cols <= 256) run(normalize_kernel<32>, 32); else run(normalize_kernel<kThreads>, kThreads);
    check_launch("normalize");
  };
}

Launch place(const std::vector<Turn>& turns, int k, int v, int64_t kv_heads, int64_t head_dim, int64_t layer) {
  return [=](const Frame& f, Address stream) {
    bool cached = layer >= 0 && f.keys != 0;
    Placing work{};
    work.of_k = -1;
    work.positions = ints(f.positions);
    int64_t items = 0;
    for (const Turn& t : turns) {
      Turning& next = work.of[work.turns];
      next = {lines(f, t.x), t.head_dim, t.pairs, t.heads * t.pairs, reinterpret_cast<const float*>(t.cos),
              reinterpret_cast<const float*>(t.sin), t.positions, t.halves};
      if (cached && t.x == k) work.of_k = work.turns;
      items += next.all_pairs;
      ++work.turns;
    }
    if (cached) {
      work.k = lines(f, k);
      work.v = lines(f, v);
      work.cache = {reinterpret_cast<char*>(f.keys), reinterpret_cast<char*>(f.values), f.cache_type, kv_heads, head_dim,
                    f.most, layer * f.cache_blocks, f.cache_blocks, ints(f.sequence), ints(f.limit), ints(f.blocks)};
      int64_t turned = work.of_k < 0 ? 0 : 2 * work.of[work.of_k].pairs;
      items += kv_heads * (2 * head_dim - turned);
    }
    each("rotary embedding and cache", stream, f.rows, items, work);
  };
}

Launch add(int x, int y, int out, int64_t width, Vector bias, bool kept) {
  return [=](const Frame& f, Address stream) {
    each("add", stream, rows_of(f, kept), width,
         Addition{lines(f, x), lines(f, y), lines(f, out), in(bias.first), bias.second});
  };
}

Launch columns(int x, int out, int64_t width, int64_t first, int64_t groups, int64_t part, bool kept) {
  return [=](const Frame& f, Address stream) {
    each("columns", stream, rows_of(f, kept), groups * width, Cut{lines(f, x), lines(f, out), first, part, width});
  };
}

Launch keep(int x, int out, int64_t width) {
  return [=](const Frame& f, Address stream) {
    each("keep", stream, f.kept, width, Kept{lines(f, x), lines(f, out), reinterpret_cast<const int64_t*>(f.wanted), f.rows});
  };
}

}  // namespace ds
