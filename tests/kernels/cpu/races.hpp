// The record of accesses to shared memory. Two accesses to a word, one of them a write, by different threads must be
// ordered by what synchronises them: a barrier, a mailbox, or within a warp a shuffle (which on a GPU orders execution
// but not memory: that distinction is not made here). Ordering between warps is kept as vector clocks.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cpu {

#ifdef CUNORM_RACES
constexpr bool kRaces = true;
#else
constexpr bool kRaces = false;
#endif

// How much of every warp of the cluster is known to have happened.
struct Clock {
  std::vector<std::uint32_t> epochs;

  void join(const Clock& other) {
    epochs.resize(std::max(epochs.size(), other.epochs.size()));
    for (std::size_t warp = 0; warp < other.epochs.size(); ++warp) {
      epochs[warp] = std::max(epochs[warp], other.epochs[warp]);
    }
  }
};

struct Access {
  int thread;           // within the cluster
  std::uint32_t epoch;  // of its warp
  std::uint32_t step;   // shuffles, barriers and waits that the thread had passed
};

// Four bytes of shared memory: who wrote them last, and who read them since.
struct Word {
  bool coming = false;  // a copy to it is under way
  Access write = {-1, 0, 0};
  std::vector<Access> reads;
};

class Races {
 public:
  void begin(int warps) {
    if constexpr (kRaces) {
      clocks_.assign(warps, Clock{std::vector<std::uint32_t>(warps)});
      for (int warp = 0; warp < warps; ++warp) clocks_[warp].epochs[warp] = 1;
    }
  }
  // What the warp did so far happens before whatever acquires `clock`.
  void release(int warp, Clock& clock) {
    if constexpr (kRaces) {
      clock.join(clocks_[warp]);
      ++clocks_[warp].epochs[warp];
    }
  }
  void acquire(int warp, const Clock& clock) {
    if constexpr (kRaces) clocks_[warp].join(clock);
  }
  // False if another thread's access is not ordered before this one.
  bool access(Word& word, int thread, std::uint32_t step, bool write) {
    const auto& clock = clocks_[thread / 32].epochs;
    const auto before = [&](const Access& other) {
      if (other.thread < 0 || other.thread == thread) return true;
      if (other.thread / 32 == thread / 32) return other.step < step;
      return clock[other.thread / 32] >= other.epoch;
    };
    if (!before(word.write)) return false;
    if (write && !std::all_of(word.reads.begin(), word.reads.end(), before)) return false;
    std::erase_if(word.reads, before);
    const Access mine = {thread, clock[thread / 32], step};
    if (write) {
      word.write = mine;
    } else {
      word.reads.push_back(mine);
    }
    return true;
  }

 private:
  std::vector<Clock> clocks_;
};

}  // namespace cpu
