// Links over shared memory: pipes (pipe.h) whose waits sleep.  Slots lie in the receiver's segment.
//
// The receiver's page holds `inbound` (slots filled, written by the sender), the sender's page
// holds `outbound` (slots read, written by the receiver): each polls its own memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/link.h"
#include "transport/shm/exchange.h"
#include "transport/shm/pipe.h"

namespace ringreduce {

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
