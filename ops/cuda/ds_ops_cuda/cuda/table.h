// Many tensors in one launch: addresses and sizes travel as the kernel's argument, so no copy to the device is needed.
#pragma once

#include <algorithm>

#include "common.h"
#include "ops.h"

namespace ds {

constexpr int kLists = 5;  // parameters, gradients, two states, copies
constexpr int kTensors = 70;  // of one launch: its arguments must stay below 4 KiB

struct Table {
  void* address[kLists][kTensors];
  int64_t size[kTensors];
  uint32_t first[kTensors + 1];  // the first block of each tensor, and how many blocks there are
  int type[kLists];  // kNone for lists that are not there
  uint8_t own_type[kTensors];  // squared_norm only, whose tensors differ
  int count;
};
static_assert(sizeof(Table) <= 3968, "leave room for the numbers that go with it");

struct Piece {
  int place;
  int64_t begin, end;
};

// What the block of this number works on. Tensors without elements have no block.
__device__ inline Piece piece_of(const Table& table, uint32_t block) {
  int low = 0, high = table.count;  // first[low] <= block < first[high]
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (table.first[middle] <= block) low = middle; else high = middle;
  }
  int64_t begin = static_cast<int64_t>(block - table.first[low]) * kChunk;
  return {low, begin, min(begin + kChunk, table.size[low])};
}

// Calls visit(table, place of its first tensor, number of its first block) for every launch that it takes.
template <class Visit>
void for_each_table(const Sizes& sizes, const int (&types)[kLists], const std::vector<const Addresses*>& lists,
                    Visit visit) {
  Table table;
  std::copy(types, types + kLists, table.type);
  int64_t blocks_before = 0;
  for (size_t start = 0; start < sizes.size(); start += table.count) {
    int64_t blocks = 0;
    table.count = 0;
    while (table.count < kTensors && start + table.count < sizes.size()) {
      size_t i = start + table.count;
      int64_t more = (sizes[i] + kChunk - 1) / kChunk;
      if (table.count > 0 && blocks + more > 0x7fffffff) break;
      if (more > 0x7fffffff) throw std::runtime_error("a tensor has more elements than one launch takes (2^44)");
      table.first[table.count] = static_cast<uint32_t>(blocks);
      table.size[table.count] = sizes[i];
      for (int l = 0; l < kLists; ++l) {
        table.address[l][table.count] = lists[l] ? reinterpret_cast<void*>(lists[l]->at(i)) : nullptr;
      }
      blocks += more;
      ++table.count;
    }
    table.first[table.count] = static_cast<uint32_t>(blocks);
    if (blocks > 0) visit(table, start, blocks_before);
    blocks_before += blocks;
  }
}

}  // namespace ds
