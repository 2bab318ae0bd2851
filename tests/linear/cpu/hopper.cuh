// kernels_cu/linear/hopper.cuh on a CPU: the same names. Copies come when somebody waits for them, no sooner; in the
// meantime their place holds NaN. Products of a warpgroup read shared memory when their thread waits for them.
#pragma once
#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

// The runtime is told by an option whether it keeps a record of races.
#ifdef __SANITIZE_THREAD__
#define CUNORM_RACES
#endif
#include "machine.hpp"

namespace cunorm {

struct Barrier {
  unsigned long long state;

  void init(int arrivals) {
    Phase& mine = phases()[this];
    mine = {};
    mine.most = mine.left = arrivals;
    mine.alive = true;
    ++cpu::progress;
  }
  static void publish() {}
  void arrive() { count(of(this), 1, 0); }
  void expect(int bytes) { count(of(this), 1, bytes); }
  void wait(int phase) {
    Phase& mine = of(this);
    cpu::wait_until("a barrier of bytes", [&] {
      if (mine.number != phase) return true;
      bring(mine);
      return mine.number != phase;
    });
    cpu::races.acquire(cpu::this_warp(), mine.released);
    ++cpu::fiber->step;
  }
  void arrive_at(int rank) { count(of(there(this, rank)), 1, 0); }
  void wait_in_order_of_cluster(int phase) { wait(phase); }
  void send(float* slot, int rank, const float (&values)[4]) {
    if (!cpu::ctas[static_cast<std::size_t>(rank)].started || cpu::ctas[static_cast<std::size_t>(rank)].done)
      cpu::fail("shared memory of a CTA is written that does not run");
    float* const to = there(slot, rank);
    cpu::note_access(cpu::ctas[static_cast<std::size_t>(rank)], to, 16, true);
    std::memcpy(to, values, 16);
    count(of(there(this, rank)), 0, -16);
  }

  struct Copy {
    void* to;
    std::vector<char> bytes;
  };
  struct Phase {
    int most = 0, left = 0, number = 0;
    long bytes = 0;
    bool alive = false;
    std::vector<Copy> copies;
    cpu::Clock arriving, released;
  };
  // The clusters of a launch run one after the other, in the memory of the same addresses or others: those of a cluster
  // are initialised before they are used.
  static std::map<Barrier*, Phase>& phases();
  static Phase& of(Barrier* barrier) {
    Phase& mine = phases()[barrier];
    if (!mine.alive) cpu::fail("a barrier is used that was not initialised");
    return mine;
  }
  static void count(Phase& mine, int arrivals, long bytes) {
    if (arrivals > mine.left) cpu::fail("more arrive at a barrier than it was told of");
    mine.left -= arrivals;
    mine.bytes += bytes;
    cpu::races.release(cpu::this_warp(), mine.arriving);
    ++cpu::progress;
    if (mine.left == 0 && mine.bytes == 0) {
      mine.left = mine.most;
      mine.number ^= 1;
      mine.released = mine.arriving;
    }
  }
  // What is under way arrives: the last copy first.
  static void bring(Phase& mine) {
    while (!mine.copies.empty()) {
      const Copy copy = mine.copies.back();
      mine.copies.pop_back();
      cpu::note_copy(copy.to, copy.bytes.size(), false);
      std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
      count(mine, 0, -static_cast<long>(copy.bytes.size()));
    }
  }
  template <class T>
  static T* there(T* here, int rank) {
    if (rank < 0 || rank >= static_cast<int>(cpu::launch.cluster)) cpu::fail("the cluster has no CTA of that rank");
    const auto offset = reinterpret_cast<const char*>(here) - cpu::dynamic_shared();
    return reinterpret_cast<T*>(
        const_cast<char*>(cpu::ctas[static_cast<std::size_t>(rank)].dynamic_shared.get() + offset));
  }
};

inline std::map<Barrier*, Barrier::Phase> every_barrier;
inline std::map<Barrier*, Barrier::Phase>& Barrier::phases() { return every_barrier; }

enum class Lifetime { kOnce, kAgain };
template <Lifetime>
unsigned long long cache_policy() {
  return 0;
}

inline void start_copy(void* to, std::vector<char> bytes, Barrier& barrier) {
  cpu::note_access(*cpu::cta, to, bytes.size(), true);
  std::memset(to, 0xff, bytes.size());
  cpu::note_copy(to, bytes.size(), true);
  Barrier::Phase& phase = Barrier::of(&barrier);
  phase.copies.push_back({to, std::move(bytes)});
  cpu::races.release(cpu::this_warp(), phase.arriving);  // who waits for the bytes waits for this write
  ++cpu::progress;
}

inline void bulk_copy(void* to, const void* from, int bytes, Barrier& barrier, unsigned long long) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 || reinterpret_cast<std::uintptr_t>(from) % 16 || bytes % 16 ||
      bytes <= 0)
    cpu::fail("a bulk copy of what is no multiple of 16 bytes");
  const char* begin = static_cast<const char*>(from);
  std::vector<char> brought(static_cast<std::size_t>(bytes));
  for (int i = 0; i < bytes; ++i) brought[static_cast<std::size_t>(i)] = begin[i];
  start_copy(to, std::move(brought), barrier);
}

// A matrix, of which boxes are `box_rows` rows of 128 bytes. If it is `late`, the kernel before makes it.
struct TensorMap {
  const char* begin;
  int64 rows, cols, stride, box_rows;
  bool late;
};
// The argument of a launch: the rest is in its type.
template <int64 kRows, int64 kCols, int64 kStride, int64 kBoxRows, bool kLate>
struct TensorMapOf {
  const char* begin;
  operator TensorMap() const { return {begin, kRows, kCols, kStride, kBoxRows, kLate}; }
};

constexpr std::size_t kBoxBytes = 128, kSwizzledBytes = 1024, kChunk = 16;
// Where 16 bytes of swizzled rows are, of which `offset` counts from a multiple of 1024 bytes.
inline std::size_t swizzled(std::size_t offset) { return offset ^ (offset / kBoxBytes % 8 * kChunk); }

inline void tensor_copy(void* to, const TensorMap& map, int column, int row, Barrier& barrier, unsigned long long) {
  if (map.late && !cpu::has_waited_for_kernel_before()) cpu::fail("what the kernel before makes is read too early");
  if ((static_cast<char*>(to) - cpu::dynamic_shared()) % kSwizzledBytes) cpu::fail("a box is not at 1024 bytes");
  std::vector<char> brought(static_cast<std::size_t>(map.box_rows) * kBoxBytes);
  for (int64 i = 0; i < map.box_rows; ++i) {
    for (std::size_t byte = 0; byte < kBoxBytes; ++byte) {
      const int64 from_row = row + i, from_column = column + static_cast<int64>(byte / 2);
      const bool there = from_row < map.rows && from_column < map.cols;
      const std::size_t place = static_cast<std::size_t>(i) * kBoxBytes + byte;
      brought[swizzled(place / kChunk * kChunk) + byte % kChunk] =
          there ? map.begin[2 * (from_row * map.stride + column) + static_cast<int64>(byte)] : 0;
    }
  }
  start_copy(to, std::move(brought), barrier);
}

inline char* shared_matrices() { return cpu::dynamic_shared(); }
inline unsigned long long matrix_in_shared(const void* place) { return reinterpret_cast<unsigned long long>(place); }

// Products of a thread that are under way, by the groups that were started together.
using Products = std::vector<std::function<void()>>;
inline std::map<const void*, std::deque<Products>> under_way;  // by fiber
inline void start_of_products() {
  auto& groups = under_way[cpu::fiber];
  if (groups.empty()) groups.emplace_back();
}
inline void end_of_products() { under_way[cpu::fiber].emplace_back(); }  // the last group is not ended yet
template <int kGroups>
void wait_for_products() {
  auto& groups = under_way[cpu::fiber];
  for (; groups.size() > kGroups + 1; groups.pop_front()) {
    for (const auto& product : groups.front()) product();
  }
  warp_barrier();  // lanes wait together
}
template <int kGroups, int kCount>
void wait_for_products(float (&)[kCount]) {
  wait_for_products<kGroups>();
}

// 16 numbers of a row of a matrix in shared memory.
template <class T>
std::array<float, 16> in_shared(unsigned long long matrix, std::size_t row) {
  char* const base = cpu::dynamic_shared();
  const std::size_t offset = static_cast<std::size_t>(reinterpret_cast<char*>(matrix) - base) + row * kBoxBytes;
  std::array<float, 16> numbers;
  for (std::size_t chunk = 0; chunk < 2; ++chunk) {
    const char* const at = base + swizzled(offset + chunk * kChunk);
    cpu::note_access(*cpu::cta, at, kChunk, false);
    uint16 bits[8];
    std::memcpy(bits, at, kChunk);
    for (std::size_t i = 0; i < 8; ++i) numbers[8 * chunk + i] = T::decode_low(bits[i]);
  }
  return numbers;
}

template <class T, int kCount>
void multiply_group(T, float (&sums)[kCount], unsigned long long z, unsigned long long weight, int adds) {
  under_way[cpu::fiber].back().push_back([&sums, z, weight, adds] {
    const std::size_t thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    const std::array<float, 16> rows[] = {in_shared<T>(z, row), in_shared<T>(z, row + 8)};
    for (std::size_t i = 0; i < kCount; i += 4) {
      for (std::size_t side = 0; side < 2; ++side) {
        const auto out = in_shared<T>(weight, i / 4 * 8 + lane % 4 * 2 + side);
        for (std::size_t half = 0; half < 2; ++half) {
          float& sum = sums[i + 2 * half + side];
          double total = adds ? sum : 0;
          for (std::size_t k = 0; k < 16; ++k) total += static_cast<double>(rows[half][k]) * out[k];
          sum = static_cast<float>(total);
        }
      }
    }
  });
}

// Of every warp of the cluster: lanes bring theirs, meet, and read those of others.
inline std::map<int, std::vector<uint32>> fragments;

template <class T>
void multiply_tiles(float (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
  auto& all = fragments[cpu::this_warp()];
  all.resize(32 * 6);
  const unsigned lane = threadIdx.x % 32;
  const uint32 mine[6] = {a0, a1, a2, a3, b0, b1};
  warp_barrier();
  for (unsigned k = 0; k < 6; ++k) all[lane * 6 + k] = mine[k];
  warp_barrier();
  const auto value = [&](unsigned from, unsigned register_, unsigned high) {
    const uint32 word = all[from * 6 + register_];
    return high ? T::decode_high(word) : T::decode_low(word);
  };
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4, column = lane % 4 * 2 + i % 2;
    double total = sums[i];
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned part = k % 8 / 2, high = k % 2;
      total += static_cast<double>(value(row * 4 + part, i / 2 + 2 * (k / 8), high)) *
               value(column * 4 + part, 4 + k / 8, high);
    }
    sums[i] = static_cast<float>(total);
  }
}

}  // namespace cunorm
