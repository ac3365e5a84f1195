// Rank 0's store outlives its group while other ranks use it.
//
// Without a launcher's store, init_process_group on rank 0 starts the server of the store, which
// ends when destroy_process_group drops the last reference.  A rank that makes its next group
// before rank 0 has destroyed the last one is connected to that server, and would lose it.  So the
// server goes on until no rank has been connected for its next group for a short time.  The next
// init_process_group on rank 0 then finds the server at its port, and uses it.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/clock.h"

namespace ringreduce {

// What a TCPStore puts before the keys of a store that is a part of it; "" for other stores.
std::string prefixInTcpStore(const c10::intrusive_ptr<c10d::Store>& store);

// Before a default group is made: a store that is kept is dropped, and the ranks that are connected
// to `store` are those of the group.
void beginOnStore(const c10::intrusive_ptr<c10d::Store>& store);

// Keeps the store from now on, if its server is in this process, and removes what groups have left
// in it.  For `longest` at most.
void keepStore(const c10::intrusive_ptr<c10d::Store>& store, Nanos longest);

// Ends the server of the store that is kept.
void dropKeptStore();

}  // namespace ringreduce
