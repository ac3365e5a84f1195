// Links over shared memory.  Slots lie in the receiver's segment, and the sender writes them there.
//
// The receiver's page holds `inbound` (slots filled, written by the sender), the sender's page
// holds `outbound` (slots read, written by the receiver): each polls a line of its own memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "wire/exchange.h"
#include "wire/link.h"

namespace ringreduce {

// The two ends of a link: whose pages, and the slots.
struct ShmPipe {
  int sender, receiver;
  Page* sender_page;
  Page* receiver_page;
  Slots slots;
};

template <class Rules = HostRules>
class BasicShmSendLink final : public SendLink {
 public:
  BasicShmSendLink(const ShmPipe& pipe, Waiter& waiter) : pipe_(pipe), waiter_(waiter) {}

  std::byte* acquire() override {
    const auto depth = static_cast<uint64_t>(pipe_.slots.depth) + Rules::kEarlyReuse;
    if (read_ + depth <= filled_) {
      waiter_.until(pipe_.receiver, [&] {
        return (read_ = pipe_.sender_page->outbound.observe<Rules>()) + depth > filled_;
      });
    }
    return pipe_.slots.at(filled_);
  }

  void post() override {
    pipe_.receiver_page->inbound.publish<Rules>(++filled_);
    ring<Rules>(*pipe_.receiver_page, pipe_.sender);
  }

 private:
  const ShmPipe pipe_;
  Waiter& waiter_;
  uint64_t filled_ = 0, read_ = 0;
};

template <class Rules = HostRules>
class BasicShmRecvLink final : public RecvLink {
 public:
  BasicShmRecvLink(const ShmPipe& pipe, Waiter& waiter) : pipe_(pipe), waiter_(waiter) {}

  const std::byte* peek() override {
    if (filled_ <= read_) {
      waiter_.until(pipe_.sender, [&] {
        return (filled_ = pipe_.receiver_page->inbound.observe<Rules>()) > read_;
      });
    }
    return pipe_.slots.at(read_);
  }

  void release() override {
    pipe_.sender_page->outbound.publish<Rules>(++read_);
    ring<Rules>(*pipe_.sender_page, pipe_.receiver);
  }

 private:
  const ShmPipe pipe_;
  Waiter& waiter_;
  uint64_t filled_ = 0, read_ = 0;
};

using ShmSendLink = BasicShmSendLink<>;
using ShmRecvLink = BasicShmRecvLink<>;

}  // namespace ringreduce
