// g++ -fsanitize=thread calls these for every access to memory. Linked in place of ThreadSanitizer's own library, they
// look at shared memory alone.
#include "races.hpp"

#include "machine.hpp"

namespace cpu {

void note_access(Cta& where, const void* address, std::size_t bytes, bool write) {
  if constexpr (!kRaces) return;
  if (!fiber) return;
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - where.shared);
  if (offset >= shared_bytes) return;  // below shared memory it is huge
  for (std::size_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) {
    if (!races.access(where.words[word], cluster_thread(*cta, *fiber), fiber->step, write)) {
      fail("race: shared memory is accessed by two threads with no barrier between");
    }
  }
}

}  // namespace cpu

#ifdef CUNORM_RACES
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESS(bytes)                                                                            \
  void __tsan_read##bytes(void* address) { cpu::note_access(*cpu::cta, address, bytes, false); } \
  void __tsan_write##bytes(void* address) { cpu::note_access(*cpu::cta, address, bytes, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS
void __tsan_read_range(void* address, unsigned long bytes) { cpu::note_access(*cpu::cta, address, bytes, false); }
void __tsan_write_range(void* address, unsigned long bytes) { cpu::note_access(*cpu::cta, address, bytes, true); }
}
#endif
