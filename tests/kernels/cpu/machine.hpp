// The parts of the machine that runs a launch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <vector>

#include "races.hpp"
#include "runtime.hpp"

namespace cpu {

// An asynchronous copy that is under way: what it brings is written when its thread has waited for it, no sooner.
struct Copy {
  unsigned group;  // of this thread: how many were committed before
  void* to;
  std::vector<char> bytes;
};

// One thread of a CTA.
struct Fiber {
  unsigned thread = 0;
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
  const char* waits_for = "";
  std::uint32_t step = 0;  // shuffles, barriers and waits passed
  bool done = false;
  bool has_waited_for_kernel_before = false;
  std::deque<Copy> copies;
  unsigned groups = 0;  // of copies, committed
};

// Where a number of threads meet; the last to arrive lets all go on.
struct Meeting {
  int arrived = 0;
  unsigned generation = 0;
  Clock arriving, released;
};

struct Barrier {
  Meeting meeting;
  int threads = 0;
};

struct Warp {
  Meeting meeting;
  int shuffle = 0;        // which kind
  char values[2][32][8];  // two sets in turn: a lane may still read those of the shuffle before
};

struct Cta {
  Index block;
  int rank = 0;
  bool started = false;
  bool done = false;
  char* shared = nullptr;
  std::unique_ptr<char, decltype(&std::free)> dynamic_shared{nullptr, &std::free};
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Barrier> barriers;
  std::vector<Word> words;  // of shared memory, then of dynamic shared memory
  // The scheduler's own stack.
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  std::size_t stack_size = 0;
};

struct Launch {
  Index grid;
  std::uint64_t threads, cluster, order, dynamic_shared;
};

extern Launch launch;
extern std::vector<std::uint64_t> arguments;
extern std::vector<Cta> ctas;     // of the cluster
extern Cta* cta;                  // that runs
extern Fiber* fiber;              // that runs
extern std::uint64_t progress;    // grows when something happens that a thread may wait for
extern std::size_t shared_bytes;  // of a CTA
extern Races races;

// Other threads run until `ready()`.
void yield();
void wait_until(const char* what, const auto& ready) {
  fiber->waits_for = what;
  while (!ready()) yield();
}

inline int cluster_thread(const Cta& of, const Fiber& who) {
  return static_cast<int>(static_cast<unsigned>(of.rank) * launch.threads + who.thread);
}
inline int this_warp() { return cluster_thread(*cta, *fiber) / 32; }

// Notes an access of the running thread to the shared memory of `where`.
void note_access(Cta& where, const void* address, std::size_t bytes, bool write);
// From now on a copy of the running thread to this place is under way, or has come.
void note_copy(const void* address, std::size_t bytes, bool coming);

void begin_meetings();  // of a new cluster
void end_meetings();
void run_grid();

}  // namespace cpu
