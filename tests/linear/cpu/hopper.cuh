// kernels_cu/linear/hopper.cuh on a CPU: the same names. Bulk copies come when somebody waits for them, no sooner; in
// the meantime their place holds NaN.
#pragma once
#include <bit>
#include <cstring>
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

inline void bulk_copy(void* to, const void* from, int bytes, Barrier& barrier, unsigned long long) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 || reinterpret_cast<std::uintptr_t>(from) % 16 || bytes % 16 ||
      bytes <= 0)
    cpu::fail("a bulk copy of what is no multiple of 16 bytes");
  const char* begin = static_cast<const char*>(from);
  Barrier::Copy copy{to, std::vector<char>(static_cast<std::size_t>(bytes))};
  for (int i = 0; i < bytes; ++i) copy.bytes[static_cast<std::size_t>(i)] = begin[i];
  cpu::note_access(*cpu::cta, to, static_cast<std::size_t>(bytes), true);
  std::memset(to, 0xff, static_cast<std::size_t>(bytes));
  cpu::note_copy(to, static_cast<std::size_t>(bytes), true);
  Barrier::Phase& phase = Barrier::of(&barrier);
  phase.copies.push_back(std::move(copy));
  cpu::races.release(cpu::this_warp(), phase.arriving);  // who waits for the bytes waits for this write
  ++cpu::progress;
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
