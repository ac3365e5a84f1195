// The ranks of a group as collectives see them that go over sockets: a stream of bytes to and from
// each.  The counterpart of the exchange (transport/shm/exchange.h), for ranks that share no
// memory.
//
//     begin(operation)          a new operation
//     send(r, data, bytes)      these bytes to rank r; the memory is lent until finish()
//     acquire(r), post(r, ...)   the same from a buffer of the mesh's, for what is made on the way
//     expect(r, data, bytes)    the next bytes from rank r go there; or into a buffer of the mesh's
//     peek(r), release(r)       what was expected first: waits until it is all there; done with it
//     advance()                 moves what can be moved; for who computes for long between calls
//     finish()                  waits until everything lent was sent, and all memory is the
//     caller's
//     scratch(bytes)            memory until finish(), for what is lent and not the caller's
//
// Sends and expectations match by their order alone: what one rank sends, the other must expect, in
// the same order, though not in the same pieces: a receiver may expect in two what was sent in one.
// The first thing that two ranks exchange in an operation, each way, is its announcement, which the
// mesh adds; peek compares it with its own before it returns.  Bytes may be 0 everywhere: the
// announcement goes even so, and is waited for.
//
// Nothing but acquire, peek and finish waits.  Whoever waits moves everything that can be moved, to
// and from all ranks, looks after the WaitGuard, and throws what that throws.  So an algorithm
// cannot deadlock as long as for every rank that waits in peek the sender has got, or will get, to
// its send.  One thread at a time uses a mesh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "algorithm/choose.h"
#include "base/clock.h"
#include "transport/tcp/connector.h"
#include "transport/tcp/scratch.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/stream.h"
#include "transport/wait_guard.h"

namespace ringreduce {

class Mesh {
 public:
  using Dial = net::Dial;  // of connections of any number to a rank

  // Connections that a rank may make to another.
  static constexpr int kMostLanes = 64;

  struct Options {
    Algorithm algorithm = Algorithm::kAuto;
    int least_lanes =
        1;  // connections to a rank; adapted between these two (transport/tcp/lane_count.h)
    int most_lanes = kMostLanes;
    WireCost cost = {};
    std::vector<int> shown = {};  // the ranks as lanes() calls them; empty: as they are here
    // When the control connections take a rank for lost.  Of one that has left or ended, bytes are
    // awaited for twice as long after the last that came.
    Nanos lost_after = 3 * kSecond;
  };

  Mesh(int rank, int size, WaitGuard& watch, Dial dial, const Options& options);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  int rank() const;
  int size() const;
  WaitGuard& watch() const;
  const Options& options() const;
  void setPatience(Patience patience);

  // A connection that rank `from` has made; closed if it has as many as a rank may have.  From any
  // thread.
  void accept(int from, net::Socket socket);

  void begin(const OpSignature& operation);
  void advance();
  void finish();

  void send(int to, const void* data, size_t bytes);
  // A buffer of net::kPieceBytes to fill and post.  There are `window()` of them for each rank;
  // waits while all are on their way.
  std::byte* acquire(int to);
  // Sends the first `bytes` of that buffer.
  void post(int to, std::byte* buffer, size_t bytes);
  static constexpr size_t window() { return 256; }

  void expect(int from, void* data, size_t bytes);
  void expect(int from, size_t bytes);  // at most net::kPieceBytes
  const std::byte* peek(int from);
  void release(int from);

  // There will be no more operations here: waits, no longer than `longest`, until what was sent has
  // reached the systems of the others, and closes the connections to them.
  void leave(Nanos longest);

  // Not initialised.
  std::byte* scratch(size_t bytes) { return scratch_.take(bytes); }

  size_t stagingBytes() const;  // memory of its buffers

  // What its connections had taken when an operation last finished, frames' heads and all.  From
  // any thread.
  uint64_t bytesSent() const;

  // For each rank that bytes were sent to: how many connections, and why.
  std::vector<std::string> lanes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
  net::Scratch scratch_;  // begin() resets it
};

}  // namespace ringreduce
