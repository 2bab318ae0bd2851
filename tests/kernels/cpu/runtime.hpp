// How kernels run without a GPU: what platform.cuh, the stand-in for that of kernels_cu, asks of the runtime.
//
// A thread of a CTA is a fiber, a CTA an operating-system thread: `__shared__` is `static thread_local`, one copy for
// all fibers of a CTA and another for each CTA of a cluster. Only one fiber runs at any time, in an order that the job
// chooses, so every run is the same.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace cpu {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// A kernel whose parameters are read from 64-bit words, each in the low bytes of its own.
struct Kernel {
  void (*call)(const std::uint64_t* words);
  const std::size_t* sizes;  // bytes of each parameter
  std::size_t parameters;
};
extern const Kernel kernel;

template <auto* entry>
struct Erased;
template <class... Parameters, void (*entry)(Parameters...)>
struct Erased<entry> {
  static constexpr std::size_t sizes[] = {sizeof(Parameters)...};
  template <class T>
  static T read(const std::uint64_t& word) {
    T value;
    std::memcpy(&value, &word, sizeof(T));
    return value;
  }
  template <std::size_t... i>
  static void call(const std::uint64_t* words, std::index_sequence<i...>) {
    entry(read<Parameters>(words[i])...);
  }
  static void call(const std::uint64_t* words) { call(words, std::index_sequence_for<Parameters...>()); }
  static constexpr Kernel kernel = {&call, sizes, sizeof...(Parameters)};
};

// Ends the process, naming the block and thread that runs.
[[noreturn]] void fail(const char* what);

void barrier(int id, int threads);
void shuffle_xor(void* value, int bytes, int lane_mask);
void shuffle_down(void* value, int bytes);
void shuffle_from(void* value, int bytes, int lane);
int cluster_rank();
void cluster_start();
void wait_for_kernel_before();
bool has_waited_for_kernel_before();  // this thread

// Whether a byte of global memory belongs to an array, as far as AddressSanitizer can tell.
bool in_array(const void* byte);

// Asynchronous copies: started with what they bring, ended for all but the last `pending` groups.
char* dynamic_shared();
void copy_start(void* to, const void* bytes, std::size_t size);
void copies_commit();
void copies_wait(int pending);

void mailbox_init(void* mailbox);
void mailbox_expect(void* mailbox, int bytes);
void mailbox_wait(void* mailbox, int phase);
void mailbox_send(void* mailbox, void* slot, int rank, const void* value, int bytes);

}  // namespace cpu

extern cpu::Index threadIdx, blockIdx, blockDim, gridDim;
