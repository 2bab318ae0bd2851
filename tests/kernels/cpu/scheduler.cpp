// Fibers, and the order in which they run: grid -> cluster -> CTA -> warp -> lane.
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <semaphore>
#include <thread>

#include "machine.hpp"

#ifdef CUNORM_ADDRESS
#include <sanitizer/common_interface_defs.h>
#endif

cpu::Index threadIdx, blockIdx, blockDim, gridDim;

// Keeps this stack with its registers in *from and goes on where `to` was kept.
extern "C" void cpu_switch_stacks(void** from, void* to);
asm(R"(
.globl cpu_switch_stacks
cpu_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace cpu {

Launch launch;
std::vector<std::uint64_t> arguments;
std::vector<Cta> ctas;
Cta* cta;
Fiber* fiber;
std::uint64_t progress;
std::size_t shared_bytes;
Races races;

namespace {

constexpr std::size_t kGuard = 4096;
constexpr std::size_t kStack = 256 << 10;
constexpr std::size_t kMatrixAlignment = 1024;  // the largest that kernels_cu asks for
constexpr int kPoison = 0xff;                   // a byte of NaN in every format: what nobody wrote shows in the results

// AddressSanitizer has to know on which stack the program is.
#ifdef CUNORM_ADDRESS
void leave_for(void** fake, const void* bottom, std::size_t size) {
  __sanitizer_start_switch_fiber(fake, bottom, size);
}
void arrive(void* fake, const void** bottom, std::size_t* size) { __sanitizer_finish_switch_fiber(fake, bottom, size); }
#else
void leave_for(void**, const void*, std::size_t) {}
void arrive(void*, const void**, std::size_t*) {}
#endif

// Calls use(i) for 0 <= i < n: ascending, descending, or the even before the odd.
void in_order(std::size_t n, const auto& use) {
  const std::size_t evens = (n + 1) / 2;
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t orders[] = {i, n - 1 - i, i < evens ? 2 * i : 2 * (i - evens) + 1};
    use(orders[launch.order]);
  }
}

// Calls pass() until nothing happens any more.
void exhaust(const auto& pass) {
  std::uint64_t before;
  do {
    before = progress;
    pass();
  } while (progress != before);
}

void fiber_main() {
  arrive(nullptr, &cta->stack_bottom, &cta->stack_size);
  kernel.call(arguments.data());
  // Its CTA's shared memory may be another's when they come.
  if (kRaces && !fiber->copies.empty()) fail("a thread ends while a copy of its own is under way");
  fiber->done = true;
  ++progress;
  yield();
  std::abort();
}

void start(Fiber& which, unsigned thread) {
  if (!which.stack) {
    void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) {
      std::perror("a stack");
      std::abort();
    }
    which.stack = static_cast<char*>(memory);
  }
  which.thread = thread;
  which.step = 0;
  which.done = false;
  which.has_waited_for_kernel_before = false;
  which.copies.clear();
  which.groups = 0;
  // As cpu_switch_stacks leaves a stack: six registers, where to go on, and a return address that is never used.
  auto** top = reinterpret_cast<void**>(which.stack + kStack);
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(&fiber_main);
  which.stack_pointer = top - 8;
}

void resume(Fiber& which) {
  if (which.done) return;
  fiber = &which;
  threadIdx = {which.thread, 0, 0};
  leave_for(&cta->fake_stack, which.stack + kGuard, kStack - kGuard);
  cpu_switch_stacks(&cta->stack_pointer, which.stack_pointer);
  arrive(cta->fake_stack, nullptr, nullptr);
}

// Each warp runs as far as it can before the next one does: a missing barrier shows in the results too.
void run_until_blocked(Cta& which) {
  cta = &which;
  blockIdx = which.block;
  exhaust([&] {
    in_order(which.warps.size(), [&](std::size_t warp) {
      exhaust([&] { in_order(32, [&](std::size_t lane) { resume(which.fibers[warp * 32 + lane]); }); });
    });
  });
  which.done = std::all_of(which.fibers.begin(), which.fibers.end(), [](const Fiber& each) { return each.done; });
}

// The thread-local variables of this program are the kernel's __shared__ ones, and no others.
char* shared_memory_of_this_thread() {
  char* begin = nullptr;
  const auto look = [](dl_phdr_info* info, std::size_t, void* result) {
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
      *static_cast<char**>(result) = static_cast<char*>(info->dlpi_tls_data);
      shared_bytes = info->dlpi_phdr[i].p_memsz;
    }
    return 1;  // the program itself comes first: enough
  };
  dl_iterate_phdr(look, &begin);
  return begin;
}

void start(Cta& which, Index block, int rank) {
  which.block = block;
  which.rank = rank;
  which.shared = shared_memory_of_this_thread();
  std::fill_n(which.shared, shared_bytes, static_cast<char>(kPoison));
  // Of its exact size, so that AddressSanitizer sees a byte too far.
  void* dynamic = nullptr;
  if (launch.dynamic_shared > 0 && posix_memalign(&dynamic, kMatrixAlignment, launch.dynamic_shared) != 0) std::abort();
  which.dynamic_shared.reset(static_cast<char*>(dynamic));
  std::fill_n(which.dynamic_shared.get(), launch.dynamic_shared, static_cast<char>(kPoison));
  which.warps.assign(launch.threads / 32, Warp());
  which.barriers.assign(16, Barrier());
  if (kRaces) which.words.assign((shared_bytes + 3) / 4 + (launch.dynamic_shared + 3) / 4, Word());
  which.fibers.resize(launch.threads);
  for (unsigned thread = 0; thread < launch.threads; ++thread) start(which.fibers[thread], thread);
  which.started = true;
  which.done = false;
}

void check_the_end() {
  for (Cta& each : ctas) {
    for (const Fiber& one : each.fibers) {
      if (one.done) continue;
      std::fprintf(stderr, "cunorm: deadlock: block (%u, %u) thread %u waits for ever for %s\n", each.block.x,
                   each.block.y, one.thread, one.waits_for);
      _exit(3);
    }
  }
  end_meetings();
}

// The CTAs of a cluster take turns, each on an operating-system thread of its own.
void take_turns(const auto& begin) {
  struct Turn {
    std::binary_semaphore go{0}, back{0};
  };
  std::vector<Turn> turns(launch.cluster);
  std::vector<std::thread> threads;
  bool over = false;
  for (std::size_t rank = 0; rank < launch.cluster; ++rank) {
    threads.emplace_back([&, rank] {
      turns[rank].go.acquire();
      begin(rank);
      while (!over) {
        run_until_blocked(ctas[rank]);
        turns[rank].back.release();
        turns[rank].go.acquire();
      }
      turns[rank].back.release();
    });
  }
  const auto pass = [&] {
    in_order(launch.cluster, [&](std::size_t rank) {
      turns[rank].go.release();
      turns[rank].back.acquire();
    });
  };
  exhaust(pass);
  check_the_end();  // while there still is the shared memory of these threads
  over = true;
  pass();
  for (std::thread& each : threads) each.join();
}

void run_cluster(Index first) {
  begin_meetings();
  for (Cta& each : ctas) each.started = false;
  const auto begin = [&](std::size_t rank) {
    start(ctas[rank], {first.x + static_cast<unsigned>(rank), first.y, first.z}, static_cast<int>(rank));
  };
  if (launch.cluster == 1) {
    begin(0);
    run_until_blocked(ctas[0]);
    check_the_end();
  } else {
    take_turns(begin);
  }
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "cunorm: %s, in block (%u, %u) thread %u\n", what, blockIdx.x, blockIdx.y, threadIdx.x);
  _exit(3);
}

void yield() {
  Fiber& mine = *fiber;
  leave_for(&mine.fake_stack, cta->stack_bottom, cta->stack_size);
  cpu_switch_stacks(&mine.stack_pointer, cta->stack_pointer);
  arrive(mine.fake_stack, &cta->stack_bottom, &cta->stack_size);
}

void run_grid() {
  gridDim = launch.grid;
  blockDim = {static_cast<unsigned>(launch.threads), 1, 1};
  ctas.resize(launch.cluster);
  in_order(launch.grid.z * launch.grid.y, [&](std::size_t zy) {
    in_order(launch.grid.x / launch.cluster, [&](std::size_t cluster) {
      run_cluster({static_cast<unsigned>(cluster * launch.cluster), static_cast<unsigned>(zy % launch.grid.y),
                   static_cast<unsigned>(zy / launch.grid.y)});
    });
  });
}

}  // namespace cpu
