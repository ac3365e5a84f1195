// Links: one-way, bounded, ordered queues of slots from one rank to the next, in shared memory.
//
//     sender:    acquire()  a free slot to fill       post()     it is filled
//     receiver:  peek()     the oldest filled slot    release()  it has been read
//
// Slots arrive in the order in which they were posted.  acquire and peek wait, and pass on
// exceptions of the WaitGuard.  Two calls of acquire (or peek) without post (or release) between
// them return the same slot.
//
// A link is a pipe (pipe.h) whose waits sleep.  Its slots lie in the receiver's segment.
// The receiver's page holds `inbound` (slots filled, written by the sender), the sender's page
// holds `outbound` (slots read, written by the receiver): each polls its own memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/shm/exchange.h"
#include "transport/shm/pipe.h"

namespace ringreduce {

class SendLink {
 public:
  virtual ~SendLink() = default;
  virtual std::byte* acquire() = 0;
  virtual void post() = 0;
};

class RecvLink {
 public:
  virtual ~RecvLink() = default;
  virtual const std::byte* peek() = 0;
  virtual void release() = 0;
};

// The two ends of a link.
struct ShmPipe {
  int sender, receiver;
  RankPage* sender_page;
  RankPage* receiver_page;
  Slots slots;
};

template <class Rules = HostRules>
class BasicShmSendLink final : public SendLink {
 public:
  BasicShmSendLink(const ShmPipe& pipe, Waiter& waiter)
      : pipe_(pipe),
        waiter_(waiter),
        sender_{.emptied = &pipe.sender_page->outbound,
                .filled = &pipe.receiver_page->inbound,
                .depth = static_cast<uint64_t>(pipe.slots.depth)} {}

  std::byte* acquire() override {
    waiter_.until(pipe_.receiver, [&] { return sender_.hasRoom(); });
    return pipe_.slots.at(sender_.next);
  }

  void post() override {
    sender_.post();
    wakeIfWaiting<Rules>(*pipe_.receiver_page, pipe_.sender);
  }

 private:
  const ShmPipe pipe_;
  Waiter& waiter_;
  PipeSender<Rules> sender_;
};

template <class Rules = HostRules>
class BasicShmRecvLink final : public RecvLink {
 public:
  BasicShmRecvLink(const ShmPipe& pipe, Waiter& waiter)
      : pipe_(pipe),
        waiter_(waiter),
        receiver_{.filled = &pipe.receiver_page->inbound,
                  .emptied = &pipe.sender_page->outbound,
                  .depth = static_cast<uint64_t>(pipe.slots.depth)} {}

  const std::byte* peek() override {
    waiter_.until(pipe_.sender, [&] { return receiver_.hasNext(); });
    return pipe_.slots.at(receiver_.next);
  }

  void release() override {
    receiver_.release();
    wakeIfWaiting<Rules>(*pipe_.sender_page, pipe_.receiver);
  }

 private:
  const ShmPipe pipe_;
  Waiter& waiter_;
  PipeReceiver<Rules> receiver_;
};

using ShmSendLink = BasicShmSendLink<>;
using ShmRecvLink = BasicShmRecvLink<>;

}  // namespace ringreduce
