// g++ -fsanitize=thread calls these for every access to memory. Linked in place of ThreadSanitizer's own library, they
// look at shared memory alone.
#include "races.hpp"

#include "machine.hpp"

namespace cpu {

namespace {

// Calls use(word) for the words of shared memory that an access touches.
void for_each_word(Cta& where, const void* address, std::size_t bytes, const auto& use) {
  // Below the memory these are huge.
  const auto fixed = static_cast<std::size_t>(static_cast<const char*>(address) - where.shared);
  const auto dynamic = static_cast<std::size_t>(static_cast<const char*>(address) - where.dynamic_shared.get());
  std::size_t first = 0;
  if (fixed < shared_bytes) {
    first = fixed;
  } else if (dynamic < launch.dynamic_shared) {
    first = (shared_bytes + 3) / 4 * 4 + dynamic;
  } else {
    return;
  }
  for (std::size_t word = first / 4; word <= (first + bytes - 1) / 4; ++word) use(where.words[word]);
}

}  // namespace

void note_access(Cta& where, const void* address, std::size_t bytes, bool write) {
  if constexpr (!kRaces) return;
  if (!fiber) return;
  for_each_word(where, address, bytes, [&](Word& word) {
    if (word.coming) fail("race: shared memory is accessed while a copy to it is under way");
    if (!races.access(word, cluster_thread(*cta, *fiber), fiber->step, write)) {
      fail("race: shared memory is accessed by two threads with no barrier between");
    }
  });
}

void note_copy(const void* address, std::size_t bytes, bool coming) {
  if constexpr (!kRaces) return;
  for_each_word(*cta, address, bytes, [&](Word& word) { word.coming = coming; });
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
