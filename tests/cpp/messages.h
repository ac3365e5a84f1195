// Sending and receiving in tests: short names, and letters that tell what they are.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "group/group.h"

namespace messages {

using ringreduce::Delivery;
using ringreduce::Group;
using ringreduce::Message;
using Letter = std::vector<uint8_t>;

// Letter `number` of a sender.
inline Letter letter(int from, int number, size_t n) {
  Letter bytes(n);
  uint32_t word =
      static_cast<uint32_t>(from) * 2654435761u + static_cast<uint32_t>(number) * 0x85ebca6bu;
  for (uint8_t& b : bytes) b = static_cast<uint8_t>((word += 0x9e3779b9u) >> 24);
  return bytes;
}

// `data` stays the caller's, and in its place, until the delivery is over; a send only reads it.
inline std::shared_ptr<Delivery> post(Group& group, Message::Direction way, int peer, int tag,
                                      const Letter& data) {
  return group.post(
      {way, peer, tag, const_cast<uint8_t*>(data.data()), data.size(), ringreduce::DType::kUInt8});
}

// Throws its error.
inline void waitFor(Group& group, const std::shared_ptr<Delivery>& delivery) {
  CHECK(group.await(*delivery, ringreduce::kNever));
  CHECK(delivery->isDone());
  if (delivery->error()) std::rethrow_exception(delivery->error());
}

inline void send(Group& group, int to, int tag, const Letter& data) {
  waitFor(group, post(group, Message::Direction::kSend, to, tag, data));
}

inline Letter receive(Group& group, int from, int tag, size_t n) {
  Letter data(n);
  waitFor(group, post(group, Message::Direction::kReceive, from, tag, data));
  return data;
}

// Looks and does nothing else until it is over.
inline void untilDone(const Delivery& delivery) {
  const auto start = std::chrono::steady_clock::now();
  while (!delivery.isDone()) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
  }
}

}  // namespace messages
