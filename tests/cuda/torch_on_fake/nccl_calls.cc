// Every rank brings what others need of it to a collective call, with what it calls; each then
// makes its result by itself.  So nobody leaves before all have come, which NCCL allows but does
// not promise, and calls that do not fit together are noticed.  A message that is sent is out of
// the stream only once it has been received: NCCL promises no more.
#include "nccl_calls.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace fake::nccl {
namespace {

const char* const kCalls[] = {"ncclAllReduce",     "ncclReduce",   "ncclBroadcast", "ncclAllGather",
                              "ncclReduceScatter", "ncclAlltoAll", "ncclSend",      "ncclRecv"};
const char* const kTypes[] = {"int8",    "uint8",    "int32",      "uint32",
                              "int64",   "uint64",   "float16",    "float32",
                              "float64", "bfloat16", "float8e4m3", "float8e5m2"};
const char* const kOpNames[] = {"sum", "product", "max", "min", "average", "scaled sum"};

bool reduces(What what) {
  return what == What::kAllReduce || what == What::kReduce || what == What::kReduceScatter;
}
bool hasRoot(What what) {
  return what == What::kReduce || what == What::kBroadcast;
}

std::string rankOf(const Wire& wire, int rank) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(wire.size());
}

Heading headingOf(const Call& call) {
  return {.kind = call.isMessage() ? Kind::kMessage : Kind::kCollective,
          .what = static_cast<int>(call.what),
          .dtype = call.dtype,
          .op = reduces(call.what) ? call.op : 0,
          .root = hasRoot(call.what) ? call.root : 0,
          .count = call.count,
          .bytes = 0};
}

Call callOf(const Heading& h) {
  return {.what = static_cast<What>(h.what),
          .input = nullptr,
          .output = nullptr,
          .count = h.count,
          .dtype = h.dtype,
          .op = h.op,
          .root = h.root};
}

// The part of the input of `from` that `to` gets, in parts of one rank's.
struct Part {
  size_t first, parts;
};
Part partFor(const Call& call, int from, int to) {
  switch (call.what) {
    case What::kReduce:
      return {0, to == call.root};
    case What::kBroadcast:
      return {0, from == call.root};
    case What::kReduceScatter:
    case What::kAllToAll:
      return {static_cast<size_t>(to), 1};
    default:
      return {0, 1};
  }
}

void collect(Wire& wire, const Call& call) {
  const size_t bytes = call.count * sizeOf(call.dtype);
  const bool splits = call.what == What::kReduceScatter || call.what == What::kAllToAll;
  const auto* input = static_cast<const std::byte*>(call.input);
  std::vector<std::byte> scaled;
  if (call.factor) {
    const size_t count = call.count * (splits ? static_cast<size_t>(wire.size()) : 1);
    scaled.assign(input, input + count * sizeOf(call.dtype));
    multiply(scaled.data(), count, call.dtype, *call.factor);
    input = scaled.data();
  }
  for (int to = 0; to < wire.size(); ++to) {
    const Part part = partFor(call, wire.rank(), to);
    Heading heading = headingOf(call);
    heading.bytes = part.parts * bytes;
    wire.send(to, heading, part.parts ? input + part.first * bytes : nullptr);
  }
  std::vector<Letter> letters;
  for (int from = 0; from < wire.size(); ++from) {
    auto letter = wire.receive(from, Kind::kCollective);
    if (!letter) return;
    Heading wanted = headingOf(call);
    wanted.bytes = partFor(call, from, wire.rank()).parts * bytes;
    if (letter->heading != wanted)
      punish(rankOf(wire, wire.rank()) + " calls " + describe(call) + ", rank " +
             std::to_string(from) + " calls " + describe(callOf(letter->heading)));
    letters.push_back(std::move(*letter));
  }
  auto* output = static_cast<std::byte*>(call.output);
  if (call.what == What::kReduce && wire.rank() != call.root) return;
  if (call.count == 0) return;
  if (reduces(call.what)) {
    std::vector<const std::byte*> inputs;
    for (const Letter& letter : letters) inputs.push_back(letter.data.data());
    reduce(inputs, output, call.count, call.dtype, call.op);
  } else if (call.what == What::kBroadcast) {
    std::memcpy(output, letters[static_cast<size_t>(call.root)].data.data(), bytes);
  } else {
    for (size_t from = 0; from < letters.size(); ++from)
      std::memcpy(output + from * bytes, letters[from].data.data(), bytes);
  }
}

void exchange(Wire& wire, const std::vector<Call>& messages) {
  Heading taken{};
  taken.kind = Kind::kTaken;
  std::map<int, int> sent;  // by peer
  for (const Call& call : messages) {
    if (call.what != What::kSend) continue;
    Heading heading = headingOf(call);
    heading.bytes = call.count * sizeOf(call.dtype);
    wire.send(call.root, heading, call.input);
    ++sent[call.root];
  }
  for (const Call& call : messages) {
    if (call.what != What::kRecv) continue;
    const auto letter = wire.receive(call.root, Kind::kMessage);
    if (!letter) return;
    const size_t bytes = call.count * sizeOf(call.dtype);
    if (letter->data.size() != bytes)
      punish(rankOf(wire, wire.rank()) + " waits for " + std::to_string(bytes) + " bytes of rank " +
             std::to_string(call.root) + ", which sends " + std::to_string(letter->data.size()));
    if (bytes > 0) std::memcpy(call.output, letter->data.data(), bytes);
    wire.send(call.root, taken, nullptr);
  }
  for (auto& [peer, messages_left] : sent)
    for (; messages_left > 0; --messages_left)
      if (!wire.receive(peer, Kind::kTaken)) return;
}

}  // namespace

size_t sizeOf(int dtype) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  static_assert(std::size(kSizes) == kDTypes);
  return kSizes[dtype];
}

std::string describe(const Call& call) {
  std::string text = kCalls[static_cast<int>(call.what)];
  text += " of " + std::to_string(call.count) + " " + kTypes[call.dtype];
  if (reduces(call.what)) text += std::string(" by ") + kOpNames[call.op];
  if (hasRoot(call.what)) text += " with root " + std::to_string(call.root);
  if (call.isMessage()) text += " with peer " + std::to_string(call.root);
  return text;
}

void perform(Wire& wire, const std::vector<Call>& calls) {
  std::vector<Call> messages;
  for (const Call& call : calls) {
    if (wire.isEnded()) return;
    call.isMessage() ? messages.push_back(call) : collect(wire, call);
  }
  exchange(wire, messages);
}

}  // namespace fake::nccl
