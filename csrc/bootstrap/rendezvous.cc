// Which side of the rendezvous a rank is on.
#include "bootstrap/rendezvous.h"

#include "base/bytes.h"
#include "bootstrap/meeting.h"
#include "transport/shm/channel.h"
#include "transport/shm/page.h"

namespace ringreduce {

// hub.cc
void leaveFailure(Store& store, const std::string& socket, Failure kind, const std::string& text);
Membership joinAsHub(Store& store, int size, const GroupOptions& options);
// caller.cc
Membership joinAsCaller(Store& store, int rank, int size, const GroupOptions& options);

Layout::Layout(const SharedOptions& options, int world_size) {
  const size_t slots = options.slot_bytes * static_cast<size_t>(options.slots);
  const auto P = static_cast<size_t>(world_size);
  exchange = roundUp(sizeof(RankPage), 4096);
  link = exchange + slots;
  boxes = link + slots;
  rings = roundUp(boxes + P * sizeof(Box), 4096);
  bytes = rings + P * kRingBytes;
}

bool isStale(Store& store, const Apart& apart) {
  const auto entry = store.get(kHubKey);
  return entry && *entry != apart.entry;
}

void removeEntry(Store& store) {
  store.remove(kHubKey);
}

void leaveReason(Store& store, const Apart& apart, Failure kind, const std::string& text) {
  leaveFailure(store, word(decode(apart.entry), "socket"), kind, text);
}

Reason reasonOf(const std::exception_ptr& error, const std::string& who) {
  const std::string gave_up = who + " gave up making the group: ";
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return {known.kind(), known.what()};
  } catch (const std::exception& known) {  // the store's, or Ctrl-C
    return {Failure::kAborted, gave_up + known.what()};
  } catch (...) {
    return {Failure::kAborted, gave_up + "interrupted"};
  }
}

Membership join(Store& store, int rank, int size, const GroupOptions& options) {
  Membership membership =
      rank == 0 ? joinAsHub(store, size, options) : joinAsCaller(store, rank, size, options);
  for (const Member& member : membership.members) member.segment->closeFd();
  return membership;
}

}  // namespace ringreduce
