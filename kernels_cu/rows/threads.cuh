// What threads of a warp, a CTA and a cluster give each other, and what a kernel says to the next.
#pragma once
#include "rows/memory.cuh"

namespace cunorm {

template <class T>
DEVICE T shuffle_xor(T value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

// That of the next lane; the last one gets its own.
template <class T>
DEVICE T shuffle_down(T value) {
  return __shfl_down_sync(0xffffffffu, value, 1);
}

// That of any lane.
template <class T>
DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

// The largest of a warp's.
DEVICE uint32 largest_of_warp(uint32 value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, value);
#else
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const uint32 other = shuffle_xor(value, mask);
    value = value > other ? value : other;
  }
  return value;
#endif
}

DEVICE void warp_barrier() { __syncwarp(); }

// A barrier among `threads` threads of the CTA (whole warps). Groups that meet apart use different ids, 1 to 15: 0 is
// __syncthreads.
DEVICE void barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// A kernel that was launched to begin before the one in front of it ends (launch.py says which) waits here until that
// one has ended and its results can be seen; otherwise there is nothing to wait for. The kernel in front says, in every
// CTA, from where on the next may begin.
DEVICE void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void next_kernel_may_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Clusters: CTAs that run side by side on sm_90 and later and reach each other's shared memory.
DEVICE int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

// Until every CTA of the cluster runs, its shared memory must not be written from outside. Relaxed, as initialised
// mailboxes are known to the cluster by a fence of their own: a release waits for the first rows of all threads,
// backward of 8 M elements, 16384 columns, 19.7 us and 20.2.
DEVICE void cluster_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A mailbox counts the bytes that arrive in this CTA's shared memory from the cluster (an mbarrier): one thread says
// how many to expect, every reader waits for them. Unlike barrier.cluster, which is also a fence, neither side waits
// for loads and stores to global memory that are under way: backward of 4096 x 65536
// took 838 us instead of 1085 on an H200.
struct Mailbox {
  unsigned long long state;

  DEVICE void init() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address()) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  DEVICE void expect(int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
#endif
  }
  // The first wait has phase 0, the next 1, then 0 again.
  DEVICE void wait(int phase) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(address()),
        "r"(phase)
        : "memory");
#endif
  }
  // Writes to the place that `slot`, a shared variable of this CTA, has in the CTA `rank`, and counts there.
  DEVICE void send(float* slot, int rank, const float (&values)[1]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(mapped(slot, rank)),
                 "f"(values[0]), "r"(mapped(&state, rank))
                 : "memory");
#endif
  }
  DEVICE void send(float* slot, int rank, const float (&values)[2]) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(mapped(slot, rank)),
        "f"(values[0]), "f"(values[1]), "r"(mapped(&state, rank))
        : "memory");
#endif
  }
  DEVICE void send(float* slot, int rank, const float (&values)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     mapped(slot, rank)),
                 "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(mapped(&state, rank))
                 : "memory");
#endif
  }
  template <int kCount>
  DEVICE void send(double* slot, int rank, const double (&values)[kCount]) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];" ::"r"(mapped(slot + k, rank)),
          "d"(values[k]), "r"(mapped(&state, rank))
          : "memory");
    }
#endif
  }

 private:
#if __CUDA_ARCH__ >= 900
  DEVICE uint32 address() { return shared_address(&state); }
  DEVICE static uint32 mapped(const void* place, int rank) {
    uint32 result;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(shared_address(place)), "r"(rank));
    return result;
  }
#endif
};

}  // namespace cunorm
