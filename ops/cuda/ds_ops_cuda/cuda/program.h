// An inference program as a list of launches. programs.py makes it; ds_inference_kit.program says what each instruction
// means. Addresses are of the device's memory and were checked by the caller.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops.h"

namespace ds {

struct Register {
  Address data;
  int64_t stride;  // elements from row to row
};

// What differs from step to step.
struct Frame {
  int type = 0;  // of registers
  int64_t rows = 0, kept = 0;  // before and after Keep
  std::vector<Register> registers;
  Address tokens = 0, positions = 0, types = 0, wanted = 0;  // 0: not there
  Address embeds = 0;  // [rows, width], of the registers' type: in place of tokens
  // int32 for each row: its sequence; tokens up to its own; tokens of its sequence; the sequence's first row
  Address sequence = 0, limit = 0, length = 0, first = 0;
  Address blocks = 0;  // int32 [sequences, most]
  int64_t most = 0;
  Address keys = 0, values = 0;  // 0: no cache
  int cache_type = 0;
  int64_t cache_blocks = 0;
  Address attended = 0;  // int32: the rows that Attend works on; 0: all
  int64_t attended_rows = 0;
  Address scratch = 0;  // fp32, see programs.py
};

using Launch = std::function<void(const Frame&, Address stream)>;
using Vector = std::pair<Address, int>;  // address (0: none) and type

// A weight [out, in]. kind: a Type, or kInt8, kInt4. columns: of contiguous columns, [in, out] in memory.
constexpr int kInt8 = 8, kInt4 = 4;
struct Matrix {
  Address data, scales, lows;  // lows 0: symmetric
  int kind;
  int64_t out, in, group;
  bool columns;
};

struct Part {  // of a product: one weight
  Matrix weight;
  Vector bias;
  int out;
};

// Heads that turn by rotary embeddings, in place.
struct Turn {
  int x;
  int64_t heads, head_dim, pairs;
  Address cos, sin;
  int64_t positions;
  bool halves;
};

struct Attention {
  int q, k, v, out;
  int64_t heads, kv_heads, head_dim;
  double scale;
  int64_t layer;  // -1: none
  bool causal;
  int64_t window;  // 0: none
  Address slopes;
  Address heads_of;  // int32 [tasks, per_task]: query heads, -1 where there are fewer; then int32 [tasks]: their key head
  int64_t tasks;
  int per_task;  // 1 or 4
};

struct MixtureOfExperts {
  int x, out;
  Matrix router, gate, up, down;  // addresses of the last three are in `table`
  Address table;  // int64 [3, experts here, 3]: data, scales and lows of gates, ups, downs
  int64_t here, first, top_k;
  bool normalize;
  int activation;
};

// Adders of launches. `kept`: the instruction is behind Keep.
Launch embed(int out, int64_t width, Vector table, int64_t entries, int by, int64_t offset, double scale, bool add);
Launch normalize(int x, int out, int64_t width, int64_t groups, Vector weight, Vector bias, double eps, bool layer,
                 bool kept);
// Turns up to two registers, then writes k and v into a layer of the cache where there is one (-1: none).
Launch place(const std::vector<Turn>& turns, int k, int v, int64_t kv_heads, int64_t head_dim, int64_t layer);
Launch add(int x, int y, int out, int64_t width, Vector bias, bool kept);
Launch columns(int x, int out, int64_t width, int64_t first, int64_t groups, int64_t part, bool kept);
Launch keep(int x, int out, int64_t width);
// One to three weights of one kind and one x; or, gated, two. add: a register, or -1.
Launch products(int x, const std::vector<Part>& parts, bool gated, int activation, int add, bool kept);
Launch experts(const MixtureOfExperts& mixture, bool kept);
Launch attend(const Attention& attention, int64_t blocks);

// Many blocks share few rows: into how many parts a sequence is cut so that about `blocks` are at work.
inline int64_t splits_for(int64_t rows, int64_t tasks, int64_t blocks) {
  int64_t splits = rows * tasks > 0 ? blocks / (rows * tasks) : 1;
  return splits < 1 ? 1 : splits > 64 ? 64 : splits;
}

struct Program {
  int64_t blocks;  // that a device should have at work at once
  std::vector<Launch> launches;

  explicit Program(int64_t blocks) : blocks(blocks) {}

  // Queues launches first .. last - 1.
  void run(Address stream, const Frame& frame, size_t first, size_t last) const {
    for (size_t i = first; i < last; ++i) launches.at(i)(frame, stream);
  }
};

// For each row of sequences that start at `starts` and have `lengths` tokens: sequence, limit, length, first (see Frame).
inline void describe_rows(const int32_t* starts, const int32_t* lengths, int64_t sequences, int32_t* out) {
  int64_t rows = starts[sequences];
  if (starts[0] != 0) throw std::runtime_error("starts begin at " + std::to_string(starts[0]));
  for (int32_t s = 0; s < sequences; ++s) {
    int32_t own = starts[s + 1] - starts[s];
    if (own < 0 || starts[s + 1] > rows || lengths[s] < own) {
      throw std::runtime_error("sequence " + std::to_string(s) + " has " + std::to_string(own) + " rows and " +
                               std::to_string(lengths[s]) + " tokens");
    }
    for (int32_t row = starts[s]; row < starts[s + 1]; ++row) {
      out[row] = s;
      out[rows + row] = lengths[s] - (starts[s + 1] - 1 - row);
      out[2 * rows + row] = lengths[s];
      out[3 * rows + row] = starts[s];
    }
  }
}

}  // namespace ds
