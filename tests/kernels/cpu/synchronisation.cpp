// What threads do together: barriers, shuffles, the mailboxes of a cluster; and asynchronous copies. Misuse that hangs
// or corrupts a GPU ends the process with a message.
#include <cstring>
#include <map>

#include "machine.hpp"

#ifdef CUNORM_ADDRESS
#include <sanitizer/asan_interface.h>
#endif

namespace cpu {
namespace {

// In the 8 bytes that a mailbox has in shared memory: the state of an mbarrier.
struct Mailbox {
  std::int32_t bytes;  // that are expected and have not arrived; those that arrive early count below zero
  std::uint8_t arrivals;
  std::uint8_t phase;
  std::uint16_t alive;
};
static_assert(sizeof(Mailbox) == 8);
constexpr std::uint16_t kAlive = 0x4d42;

struct Clocks {
  Clock arriving, released;
};
std::map<Mailbox*, Clocks> mailboxes;  // of the cluster
Meeting cluster_meeting;

void meet(Meeting& meeting, int threads, const char* what) {
  races.release(this_warp(), meeting.arriving);
  ++progress;
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    ++meeting.generation;
    meeting.released = meeting.arriving;
  }
  wait_until(what, [&] { return meeting.generation != generation; });
  races.acquire(this_warp(), meeting.released);
  ++fiber->step;
}

Mailbox& living(void* place) {
  auto& mailbox = *static_cast<Mailbox*>(place);
  if (mailbox.alive != kAlive) fail("a mailbox is used that was not initialised");
  return mailbox;
}

void count(Mailbox& mailbox, int arrivals, int bytes) {
  if (arrivals > mailbox.arrivals) fail("a mailbox is told twice what to expect");
  mailbox.arrivals = static_cast<std::uint8_t>(mailbox.arrivals - arrivals);
  mailbox.bytes += bytes;
  races.release(this_warp(), mailboxes[&mailbox].arriving);
  ++progress;
  if (mailbox.arrivals == 0 && mailbox.bytes == 0) {
    mailbox.arrivals = 1;
    mailbox.phase ^= 1;
    mailboxes[&mailbox].released = mailboxes[&mailbox].arriving;
  }
}

// The value of the lane `from`. `which` tells kinds of shuffles apart.
void shuffle(void* value, int bytes, int which, unsigned from) {
  Warp& warp = cta->warps[fiber->thread / 32];
  if (warp.meeting.arrived > 0 && warp.shuffle != which) fail("the lanes of a warp are at different shuffles");
  warp.shuffle = which;
  auto& values = warp.values[warp.meeting.generation % 2];
  std::memcpy(values[fiber->thread % 32], value, static_cast<std::size_t>(bytes));
  meet(warp.meeting, 32, "a shuffle");
  std::memcpy(value, values[from], static_cast<std::size_t>(bytes));
}

}  // namespace

void begin_meetings() {
  cluster_meeting = Meeting();
  mailboxes.clear();
  races.begin(static_cast<int>(launch.cluster * launch.threads / 32));
}

void end_meetings() {
  for (const auto& [mailbox, clocks] : mailboxes) {
    if (mailbox->bytes != 0) fail("a mailbox is left with bytes that were not expected, or did not arrive");
  }
}

void barrier(int id, int threads) {
  Barrier& barrier = cta->barriers[static_cast<std::size_t>(id)];
  if (threads <= 0 || threads % 32 != 0) fail("a barrier is for whole warps");
  if (barrier.meeting.arrived > 0 && barrier.threads != threads) fail("threads disagree on how many meet at a barrier");
  barrier.threads = threads;
  meet(barrier.meeting, threads, "a barrier");
}

void shuffle_xor(void* value, int bytes, int lane_mask) {
  if (lane_mask < 0 || lane_mask > 31) fail("a shuffle reaches beyond its warp");
  shuffle(value, bytes, lane_mask, fiber->thread % 32 ^ static_cast<unsigned>(lane_mask));
}

void shuffle_down(void* value, int bytes) {
  const unsigned lane = fiber->thread % 32;
  shuffle(value, bytes, 32, lane < 31 ? lane + 1 : lane);
}

void shuffle_from(void* value, int bytes, int lane) {
  if (lane < 0 || lane > 31) fail("a shuffle reaches beyond its warp");
  shuffle(value, bytes, 33, static_cast<unsigned>(lane));
}

bool in_array([[maybe_unused]] const void* byte) {
#ifdef CUNORM_ADDRESS
  return !__asan_address_is_poisoned(byte);
#else
  return true;
#endif
}

void wait_for_kernel_before() { fiber->has_waited_for_kernel_before = true; }
bool has_waited_for_kernel_before() { return fiber->has_waited_for_kernel_before; }

char* dynamic_shared() { return cta->dynamic_shared.get(); }

void copy_start(void* to, const void* bytes, std::size_t size) {
  const auto* begin = static_cast<const char*>(bytes);
  fiber->copies.push_back({fiber->groups, to, {begin, begin + size}});
  note_copy(to, size, true);
}

void copies_commit() { ++fiber->groups; }

void copies_wait(int pending) {
  auto& copies = fiber->copies;
  for (; !copies.empty() && copies.front().group + static_cast<unsigned>(pending) < fiber->groups; copies.pop_front()) {
    const Copy& copy = copies.front();
    note_copy(copy.to, copy.bytes.size(), false);
    note_access(*cta, copy.to, copy.bytes.size(), true);
    std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
  }
}

int cluster_rank() { return cta->rank; }
void cluster_start() { meet(cluster_meeting, static_cast<int>(launch.cluster * launch.threads), "its cluster"); }

void mailbox_init(void* place) {
  auto* mailbox = static_cast<Mailbox*>(place);
  *mailbox = {0, 1, 0, kAlive};
  mailboxes[mailbox];
  ++progress;
}

void mailbox_expect(void* place, int bytes) { count(living(place), 1, bytes); }

void mailbox_wait(void* place, int phase) {
  Mailbox& mailbox = living(place);
  wait_until("a mailbox", [&] { return mailbox.phase != phase; });
  races.acquire(this_warp(), mailboxes[&mailbox].released);
  ++fiber->step;
}

void mailbox_send(void* place, void* slot, int rank, const void* value, int bytes) {
  if (rank < 0 || rank >= static_cast<int>(launch.cluster)) fail("the cluster has no CTA of that rank");
  Cta& to = ctas[static_cast<std::size_t>(rank)];
  if (!to.started || to.done) fail("shared memory of a CTA is written that does not run");
  const auto there = [&](void* here) { return to.shared + (static_cast<char*>(here) - cta->shared); };
  Mailbox& mailbox = living(there(place));
  note_access(to, there(slot), static_cast<std::size_t>(bytes), true);
  std::memcpy(there(slot), value, static_cast<std::size_t>(bytes));
  count(mailbox, 0, -bytes);
}

}  // namespace cpu
