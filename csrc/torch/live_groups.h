// The groups of this process that are alive, and how one is left.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

namespace ringreduce {

class Attempt;
class GpuBackend;
class Group;

// For shutdownAll: a group with its GPUs, which are null in a build without CUDA.
void addLive(const std::shared_ptr<Group>& group, const c10::intrusive_ptr<GpuBackend>& gpu);
// The same of a change of members, which is under way as long as `change` lives.
void addLive(const std::shared_ptr<Attempt>& change);

// Ends the changes of members, runs the queued operations of all living groups of this process, and
// leaves them: for a process that ends without having destroyed its groups.
void shutdownAll();

// These log errors: no caller can receive them.  Of a group, other ranks are waited for a second.
void leave(Group& group);
void leave(GpuBackend& gpu, bool abort = false);

}  // namespace ringreduce
