#include "wan_packet.h"

#include <algorithm>
#include <cstring>

namespace wan {

namespace {

// Header fields, where the protocols have them.
constexpr size_t kIpv4Length = 2, kIpv4Id = 4, kIpv4Checksum = 10, kIpv4Source = 12;
constexpr size_t kIpv6Length = 4, kIpv6Source = 8, kIpv6Header = 40;
constexpr size_t kTcpSequence = 4, kTcpDataOffset = 12, kTcpFlags = 13, kTcpChecksum = 16;
constexpr size_t kTcpHeader = 20;
constexpr uint8_t kFin = 0x01, kPush = 0x08, kCongestionWindowReduced = 0x80;
constexpr uint32_t kTcp = 6;

uint32_t get16(const std::byte* at) {
  return std::to_integer<uint32_t>(at[0]) << 8 | std::to_integer<uint32_t>(at[1]);
}
uint32_t get32(const std::byte* at) {
  return get16(at) << 16 | get16(at + 2);
}
void put16(std::byte* at, uint32_t value) {
  at[0] = static_cast<std::byte>(value >> 8);
  at[1] = static_cast<std::byte>(value);
}
void put32(std::byte* at, uint32_t value) {
  put16(at, value >> 16);
  put16(at + 2, value);
}

uint32_t sum16(const std::byte* at, size_t bytes) {
  uint32_t sum = 0;
  for (size_t i = 0; i + 1 < bytes; i += 2) sum += get16(at + i);
  return sum;
}
uint32_t fold(uint32_t sum) {
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return sum;
}

}  // namespace

std::optional<Run> Run::of(const std::byte* data, size_t bytes) {
  Run run;
  if (bytes < sizeof run.offload_ + kTcpHeader) return std::nullopt;
  std::memcpy(&run.offload_, data, sizeof run.offload_);
  run.packet_ = data + sizeof run.offload_;
  run.bytes_ = bytes - sizeof run.offload_;
  run.version_ = std::to_integer<int>(run.packet_[0]) >> 4;
  if (run.version_ != 4 && (run.version_ != 6 || run.bytes_ < kIpv6Header)) return std::nullopt;

  const uint8_t kind = run.offload_.kind;
  if (kind != Offload::kTcp4 && kind != Offload::kTcp6) return run;
  const size_t tcp = run.offload_.checksum_start;
  if (run.offload_.segment == 0 || tcp + kTcpHeader > run.bytes_) return std::nullopt;
  run.headers_ = tcp + (std::to_integer<size_t>(run.packet_[tcp + kTcpDataOffset]) >> 4) * 4;
  if (run.headers_ >= run.bytes_) return std::nullopt;
  const size_t payload = run.bytes_ - run.headers_;
  run.packets_ = static_cast<int64_t>((payload + run.offload_.segment - 1) / run.offload_.segment);
  return run;
}

uint32_t Run::destination() const {
  return get16(destinationAddress() + (version_ == 4 ? 2 : 14));
}

int64_t Run::bytesOf(int64_t first, int64_t count) const {
  if (packets_ == 1) return static_cast<int64_t>(bytes_);
  const int64_t payload = static_cast<int64_t>(bytes_ - headers_), each = offload_.segment;
  return std::min(payload, (first + count) * each) - first * each +
         count * static_cast<int64_t>(headers_);
}

Piece Run::piece(int64_t first, int64_t count) const {
  Piece piece;
  Offload offload = offload_;
  const bool whole = count == packets_;
  const size_t each = offload_.segment, start = static_cast<size_t>(first) * each;
  const size_t payload =
      whole ? 0 : std::min(bytes_ - headers_ - start, static_cast<size_t>(count) * each);
  const size_t bytes = whole ? bytes_ : headers_ + payload;
  piece.bytes = sizeof offload + bytes;
  piece.data = std::make_unique_for_overwrite<std::byte[]>(piece.bytes);
  std::byte* const packet = piece.data.get() + sizeof offload;
  if (whole) {
    std::memcpy(piece.data.get(), &offload, sizeof offload);
    std::memcpy(packet, packet_, bytes);
    return piece;
  }

  if (count == 1) offload.kind = Offload::kNone, offload.segment = 0;
  std::memcpy(piece.data.get(), &offload, sizeof offload);
  std::memcpy(packet, packet_, headers_);
  std::memcpy(packet + headers_, packet_ + headers_ + start, payload);

  const size_t tcp = offload.checksum_start;
  if (version_ == 4) {
    put16(packet + kIpv4Length, static_cast<uint32_t>(bytes));
    put16(packet + kIpv4Id, get16(packet + kIpv4Id) + static_cast<uint32_t>(first));
    put16(packet + kIpv4Checksum, 0);
    put16(packet + kIpv4Checksum, ~fold(sum16(packet, tcp)));
  } else {
    put16(packet + kIpv6Length, static_cast<uint32_t>(bytes - kIpv6Header));
  }
  std::byte* const segment = packet + tcp;
  put32(segment + kTcpSequence, get32(segment + kTcpSequence) + static_cast<uint32_t>(start));
  std::byte& flags = segment[kTcpFlags];
  if (first + count < packets_) flags &= static_cast<std::byte>(~(kFin | kPush));
  if (first > 0) flags &= static_cast<std::byte>(~kCongestionWindowReduced);
  // Of the checksum only the part that depends on addresses and length: the device adds the rest.
  const uint32_t addresses =
      version_ == 4 ? sum16(packet + kIpv4Source, 8) : sum16(packet + kIpv6Source, 32);
  put16(segment + kTcpChecksum, fold(addresses + kTcp + static_cast<uint32_t>(bytes - tcp)));
  return piece;
}

}  // namespace wan
