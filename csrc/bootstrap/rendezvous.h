// How the ranks of a host find each other and come to share memory.
//
// Rank 0 listens on an abstract Unix socket with a random name and puts that name, a random secret
// and the shared options into the store, under one key.  Everybody else connects, is known by its
// user id and the secret, and sends its own shared memory; when all are there rank 0 takes the key
// out of the store and sends everybody the table of all members, with their memory and a descriptor
// each that tells when their process ends.  Each maps it all and says so; rank 0's last word then
// starts the group, or ends it for all with the first error that any rank met.
//
// So a group can be made again on the same store, and an entry of an earlier run, whose socket
// nobody answers, is waited out until this run's rank 0 has replaced it.  If rank 0 gives up, it
// leaves the reason in the store for those who come later.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "bootstrap/options.h"
#include "bootstrap/store.h"
#include "transport/shm/page.h"
#include "transport/shm/segment.h"

namespace ringreduce {

struct Member {
  int pid = 0;  // as it calls itself: another number than here in a PID namespace of its own
  std::string host;
  std::shared_ptr<Segment> segment;
  std::shared_ptr<Fd> process;  // readable once the process has ended; null where that is not known
};

struct Membership {
  SharedOptions options;
  std::vector<Member> members;  // by rank
};

// A rank's shared memory: its page, the exchange's slots, the inbound link's slots, and a box and a
// ring for each rank's messages.  Pages of it that nothing was written to cost nothing.
struct Layout {
  Layout(const SharedOptions& options, int world_size);
  size_t exchange, link, boxes, rings, bytes;  // offsets, and the whole
};

// A rank's segment, and the page at its start.
inline std::byte* memoryOf(const Membership& membership, int rank) {
  return membership.members[static_cast<size_t>(rank)].segment->data();
}
inline RankPage& pageOf(const Membership& membership, int rank) {
  return *reinterpret_cast<RankPage*>(memoryOf(membership, rank));
}

// Thrown by `join` where ranks are on several hosts, or are to go over sockets all the same: then
// they are to meet (bootstrap/hosts.h).
struct Apart {
  std::string entry;  // rank 0's, in the store, that says so
};
// Whether rank 0 has put something else there since: then that entry was of an earlier run.
bool isStale(Store& store, const Apart& apart);
// Rank 0's, once all have met.
void removeEntry(Store& store);
// The same where they could not: the reason takes the entry's place, for ranks that come later.
void leaveReason(Store& store, const Apart& apart, Failure kind, const std::string& text);
// A rank other than 0 has heard the reason, and does not take it for that of its next attempt.
void noteFailure(const Apart& apart, int rank);

// Why rank 0, which `who` names, gave up making a group, as the others are told.
struct Reason {
  Failure kind;
  std::string text;
};
Reason reasonOf(const std::exception_ptr& error, const std::string& who);

// Blocks until all ranks are there.  Throws Apart, or Error: kTimeout naming who did not come,
// kSetup for what cannot be mended by waiting (a world size that differs, a rank taken twice).
Membership join(Store& store, int rank, int size, const GroupOptions& options);

}  // namespace ringreduce
