// Matching, and the eager and the granted way of sending.
#include "p2p/engine.h"

#include <algorithm>

#include "base/bytes.h"

namespace ringreduce {
namespace {

// Records that one pass takes from one rank: enough for a full ring, and then other ranks are
// served.
constexpr int kRecordsAPass = 16;

}  // namespace

Engine::Engine(std::vector<Channels> channels) {
  peers_.reserve(channels.size());
  for (const Channels& each : channels) peers_.emplace_back(each);
}

void Engine::post(const Handle& transfer) {
  transfer->number = posts_++;
  pending_.insert(transfer);
  const Message& m = transfer->message;
  if (m.direction == Message::Direction::kSend) {
    peers_[static_cast<size_t>(m.peer)].unannounced.push_back(transfer);
    return;
  }
  int rank = m.peer;
  Arrival arrival;
  if (takeArrival(*transfer, rank, arrival)) {
    match(transfer, rank, arrival, arrival.payload.data(), finished_by_post_);
    touched_by_post_.push_back(rank);
  } else {
    posted_[{m.peer, m.tag}].push_back(transfer);
  }
}

bool Engine::progress(std::vector<Handle>& finished, std::vector<int>& touched) {
  const bool posted = !finished_by_post_.empty();
  finished.insert(finished.end(), finished_by_post_.begin(), finished_by_post_.end());
  finished_by_post_.clear();
  touched.insert(touched.end(), touched_by_post_.begin(), touched_by_post_.end());
  touched_by_post_.clear();
  for (size_t r = 0; r < peers_.size(); ++r) {
    const bool drained = drain(static_cast<int>(r), finished);
    const bool pushed = push(peers_[r], finished);
    if (drained || pushed) touched.push_back(static_cast<int>(r));
  }
  return posted || !touched.empty();
}

void Engine::cancel(const Handle& transfer) {
  const Message& m = transfer->message;
  const auto forget = [&](std::deque<Handle>& from) { std::erase(from, transfer); };
  const auto forgetIn = [&](std::map<uint64_t, Handle>& from) {
    std::erase_if(from, [&](const auto& entry) { return entry.second == transfer; });
  };
  if (m.direction == Message::Direction::kSend) {
    Peer& peer = peers_[static_cast<size_t>(m.peer)];
    forget(peer.unannounced);
    forget(peer.granted);
    forgetIn(peer.requested);
  } else if (transfer->matched) {
    forgetIn(peers_[static_cast<size_t>(transfer->source)].receiving);
  } else if (const auto found = posted_.find({m.peer, m.tag}); found != posted_.end()) {
    forget(found->second);
  }
  transfer->over = true;
  pending_.erase(transfer);
}

// Grants first, since peers wait for them.  Fragments last, so that a large message does not delay
// small ones.
bool Engine::push(Peer& peer, std::vector<Handle>& finished) {
  ChannelWriter& out = peer.channels.out;
  bool moved = false;
  while (!peer.grants.empty()) {
    if (!out.reserve(0)) return moved;
    out.commit(peer.grants.front());
    peer.grants.pop_front();
    moved = true;
  }
  while (!peer.unannounced.empty()) {
    const Handle transfer = peer.unannounced.front();
    const Message& m = transfer->message;
    const size_t bytes = m.bytes();
    MessagePart part{.id = peer.next_id,
                     .count = m.count,
                     .posted = transfer->posted,
                     .why = transfer->why,
                     .tag = m.tag,
                     .dtype = m.dtype};
    const bool eager =
        bytes <= kEagerBytes &&
        peer.eager_sent + bytes <= peer.channels.acknowledged->observe() + kEagerBudget;
    std::byte* payload = out.reserve(eager ? bytes : 0);
    if (!payload) return moved;
    part.type = eager ? MessagePart::Type::kEager : MessagePart::Type::kRequest;
    if (eager) {
      part.payload = static_cast<uint32_t>(bytes);
      copyBytes(payload, m.data, bytes);
      peer.eager_sent += bytes;
    }
    out.commit(part);
    transfer->id = peer.next_id++;
    peer.unannounced.pop_front();
    if (eager)
      finish(transfer, finished);
    else
      peer.requested.emplace(transfer->id, transfer);
    moved = true;
  }
  while (!peer.granted.empty()) {
    const Handle transfer = peer.granted.front();
    const Message& m = transfer->message;
    const size_t bytes = std::min(kFragmentBytes, m.bytes() - transfer->moved);
    std::byte* payload = out.reserve(bytes);
    if (!payload) return moved;
    copyBytes(payload, static_cast<const std::byte*>(m.data) + transfer->moved, bytes);
    out.commit({.id = transfer->id,
                .payload = static_cast<uint32_t>(bytes),
                .type = MessagePart::Type::kFragment});
    transfer->moved += bytes;
    moved = true;
    if (transfer->moved == m.bytes()) {
      peer.granted.pop_front();
      finish(transfer, finished);
    }
  }
  return moved;
}

bool Engine::drain(int rank, std::vector<Handle>& finished) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  bool moved = false;
  for (int i = 0; i < kRecordsAPass; ++i) {
    const MessagePart* part = peer.channels.in.front();
    if (!part) break;
    const auto* payload = reinterpret_cast<const std::byte*>(part + 1);
    const uint32_t bytes = part->payload;
    moved = true;
    switch (part->type) {
      case MessagePart::Type::kEager:
      case MessagePart::Type::kRequest:
        arrive(rank, *part, payload, finished);
        break;
      case MessagePart::Type::kGrant:
        // Absent if the send was cancelled.
        if (auto found = peer.requested.extract(part->id)) {
          found.mapped()->matched = true;
          found.mapped()->peer_posted = part->posted;
          found.mapped()->peer_why = part->why;
          peer.granted.push_back(std::move(found.mapped()));
        }
        break;
      case MessagePart::Type::kFragment:
        if (const auto found = peer.receiving.find(part->id); found != peer.receiving.end()) {
          const Handle receive = found->second;
          // Never more than the message has room for, whatever the peer sends.
          const size_t taken = std::min<size_t>(bytes, receive->message.bytes() - receive->moved);
          copyBytes(static_cast<std::byte*>(receive->message.data) + receive->moved, payload,
                    taken);
          receive->moved += taken;
          if (receive->moved == receive->message.bytes()) {
            peer.receiving.erase(found);
            finish(receive, finished);
          }
        }
        break;
      case MessagePart::Type::kSkip:
        break;
    }
    peer.channels.in.pop(bytes);
  }
  return moved;
}

// A message has arrived: with its payload, or as a request.
void Engine::arrive(int rank, const MessagePart& part, const std::byte* payload,
                    std::vector<Handle>& finished) {
  Arrival arrival{.order = arrivals_++,
                  .id = part.id,
                  .count = part.count,
                  .dtype = part.dtype,
                  .eager = part.type == MessagePart::Type::kEager,
                  .posted = part.posted,
                  .why = part.why,
                  .payload = {}};
  if (const Handle receive = takePosted(rank, part.tag))
    return match(receive, rank, arrival, payload, finished);
  if (arrival.eager) arrival.payload.assign(payload, payload + part.payload);
  unexpected_[{rank, part.tag}].push_back(std::move(arrival));
}

// Takes the first posted receive that matches a message of this rank and tag.
Engine::Handle Engine::takePosted(int rank, int tag) {
  const auto fits = [&](int source) {
    const auto found = posted_.find({source, tag});
    return found == posted_.end() || found->second.empty() ? posted_.end() : found;
  };
  auto first = fits(rank);
  if (const auto any = fits(kAnySource); any != posted_.end())
    if (first == posted_.end() || any->second.front()->number < first->second.front()->number)
      first = any;
  if (first == posted_.end()) return nullptr;
  Handle receive = std::move(first->second.front());
  first->second.pop_front();
  if (first->second.empty()) posted_.erase(first);
  return receive;
}

// Takes the first message that matches a receive.
bool Engine::takeArrival(Transfer& receive, int& rank, Arrival& arrival) {
  const Message& m = receive.message;
  auto first = unexpected_.end();
  const auto consider = [&](int source) {
    const auto found = unexpected_.find({source, m.tag});
    if (found != unexpected_.end() &&
        (first == unexpected_.end() || found->second.front().order < first->second.front().order))
      first = found;
  };
  if (m.peer != kAnySource)
    consider(m.peer);
  else
    for (size_t r = 0; r < peers_.size(); ++r) consider(static_cast<int>(r));
  if (first == unexpected_.end()) return false;
  rank = first->first.first;
  arrival = std::move(first->second.front());
  first->second.pop_front();
  if (first->second.empty()) unexpected_.erase(first);
  return true;
}

void Engine::match(const Handle& receive, int rank, const Arrival& arrival,
                   const std::byte* payload, std::vector<Handle>& finished) {
  const Message& m = receive->message;
  receive->source = rank;
  receive->matched = true;
  receive->id = arrival.id;
  receive->peer_posted = arrival.posted;
  receive->peer_why = arrival.why;
  if (arrival.count != m.count || arrival.dtype != m.dtype) {
    receive->mismatch = true;
    receive->sent_count = arrival.count;
    receive->sent_dtype = arrival.dtype;
    return finish(receive, finished);
  }
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (!arrival.eager) {
    peer.grants.push_back({.id = arrival.id,
                           .posted = receive->posted,
                           .why = receive->why,
                           .type = MessagePart::Type::kGrant});
    peer.receiving.emplace(arrival.id, receive);
    return;
  }
  copyBytes(m.data, payload, m.bytes());
  receive->moved = m.bytes();
  consume(rank, m.bytes());
  finish(receive, finished);
}

void Engine::finish(const Handle& transfer, std::vector<Handle>& finished) {
  transfer->over = true;
  pending_.erase(transfer);
  finished.push_back(transfer);
}

void Engine::consume(int rank, size_t bytes) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  peer.eager_consumed += bytes;
  peer.channels.consumed->publish(peer.eager_consumed);
}

}  // namespace ringreduce
