// What sm_90 has for a kernel that streams a matrix through tensor cores: barriers that count bytes, bulk copies,
// shared memory of other CTAs, matrix products. As rows/platform.cuh it is spelled anew for a CPU (tests/linear/cpu).
#pragma once

namespace cunorm {

// What a thread does each time it finds that it must still wait. Tests put a limit here.
DEVICE void still_waiting() {}

// Phases of arrivals and bytes (an mbarrier). A phase ends when all arrivals and all bytes that were expected have
// come; phases are numbered 0, 1, 0, ... Order holds within the CTA but for what is said to be of the cluster: with the
// order of the cluster at every stage of a ring a stream of weights took 1.3 times as long.
struct Barrier {
  unsigned long long state;

  DEVICE void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(arrivals) : "memory");
  }
  // After the last init of a thread: other CTAs and bulk copies know these barriers.
  DEVICE static void publish() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  DEVICE void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
  }
  // Arrives, and expects bytes in this phase.
  DEVICE void expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)), "r"(bytes)
                 : "memory");
  }
  DEVICE void wait(int phase) {
    while (!has_ended(phase)) still_waiting();
  }

  // The same barrier in the CTA `rank`. What this thread read it has read; what it wrote may come later (in order of
  // the cluster it took 3 us, beside a full ring).
  DEVICE void arrive_at(int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped(&state, rank)) : "memory");
  }
  DEVICE void wait_in_order_of_cluster(int phase) {
    while (!has_ended_in_order_of_cluster(phase)) still_waiting();
  }
  // Writes to the place that `slot` has in the CTA `rank`, and counts 16 bytes there.
  DEVICE void send(float* slot, int rank, const float (&values)[4]) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     mapped(slot, rank)),
                 "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(mapped(&state, rank))
                 : "memory");
  }

 private:
  DEVICE static uint32 mapped(const void* place, int rank) {
    uint32 result;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(shared_address(place)), "r"(rank));
    return result;
  }
  DEVICE bool has_ended(int phase) {
    uint32 ended;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(ended)
        : "r"(shared_address(&state)), "r"(phase)
        : "memory");
    return ended;
  }
  DEVICE bool has_ended_in_order_of_cluster(int phase) {
    uint32 ended;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(ended)
        : "r"(shared_address(&state)), "r"(phase)
        : "memory");
    return ended;
  }
};

// What L2 is told of lines that are read: nobody reads them again, or all SMs do.
enum class Lifetime { kOnce, kAgain };
template <Lifetime kLifetime>
DEVICE unsigned long long cache_policy() {
  unsigned long long policy;
  if constexpr (kLifetime == Lifetime::kOnce) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

// Bytes from global to shared memory, both addresses and the number multiples of 16; `barrier` counts them.
DEVICE void bulk_copy(void* to, const void* from, int bytes, Barrier& barrier, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier.state)), "l"(policy)
      : "memory");
}

// sums(16, 8) += a(16, 16) b(16, 8). With row = lane / 4 and part = lane % 4 a lane has of a the columns 2 * part and
// 2 * part + 1 of row and row + 8, then the same 8 columns further on; of b these of row of its transpose; of sums the
// columns 2 * part and 2 * part + 1 of row, then of row + 8.
template <class T>
DEVICE void multiply_tiles(float (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1);
template <>
DEVICE void multiply_tiles<bfloat16>(float (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0,
                                     uint32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
DEVICE void multiply_tiles<half>(float (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Matrices in global memory, as the driver describes them (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// A box of a matrix from global to shared memory; `barrier` counts all of its bytes, also those beyond the matrix,
// which are zeros.
DEVICE void tensor_copy(void* to, const TensorMap& map, int column, int row, Barrier& barrier,
                        unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier.state)), "l"(policy)
      : "memory");
}

// Products of a warpgroup, of which the text of a kernel has the instruction for its number of outs:
// multiply_group(T{}, sums, z, weight, adds): sums(64, outs) (+)= z(64, 16) weight(outs, 16)ᵀ
// where z and weight are places in shared memory as matrix_in_shared tells them. The lane `row * 4 + part` of the warp
// w has of sums the columns 2 * part and 2 * part + 1 of each block of 8, of row 16 * w + row, then of the eighth row
// after. Products run beside the threads, and those that were started together end together.

// Dynamic shared memory for matrices: rows of 128 bytes, of which eight are swizzled within 1024 bytes.
DEVICE char* shared_matrices() {
  extern __shared__ __align__(1024) char matrices[];
  return matrices;
}
DEVICE unsigned long long matrix_in_shared(const void* place) {
  constexpr unsigned long long kUnused = 1ull << 16, kEightRows = 1024, kSwizzled = 1ull << 62;
  return (shared_address(place) & 0x3ffff) >> 4 | kUnused | kEightRows >> 4 << 32 | kSwizzled;
}
DEVICE void start_of_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_of_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all that were started together have ended but the last kGroups of them.
template <int kGroups>
DEVICE void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
// Their sums are not read before.
template <int kGroups, int kCount>
DEVICE void wait_for_products(float (&sums)[kCount]) {
  wait_for_products<kGroups>();
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

}  // namespace cunorm
