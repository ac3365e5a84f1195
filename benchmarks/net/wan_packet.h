// An IP packet as a tun device hands it over, and pieces of it.
//
// The kernel leaves it to the device to cut a long run of one TCP stream into packets and to fill
// in checksums, as a network card would do.  So one read may bring 64 KiB, which costs far less
// than 45 reads.  The emulator cuts such a run only where a packet is lost, and into pieces that
// are short on the line; a piece goes to the receiver as one run again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace wan {

// What comes before each packet at a tun device with IFF_VNET_HDR.  (The kernel's own header for it
// is no C++.)
struct Offload {
  static constexpr uint8_t kNone = 0, kTcp4 = 1, kTcp6 = 4;

  uint8_t flags = 0;
  uint8_t kind = kNone;          // how a run is to be cut up
  uint16_t header_bytes = 0;     // a hint
  uint16_t segment = 0;          // payload of a packet of a run
  uint16_t checksum_start = 0;   // where TCP's header begins
  uint16_t checksum_offset = 0;  // where its checksum belongs, from there
};
static_assert(sizeof(Offload) == 10);

// What is written to a tun device: an Offload and the packet.
struct Piece {
  std::unique_ptr<std::byte[]> data;
  size_t bytes = 0;
};

// What a tun device was read into: the same, not owned.
class Run {
 public:
  static constexpr size_t kMost = sizeof(Offload) + 65536 + 128;

  // nullopt if it is neither IPv4 nor IPv6, or is not what its header says.
  static std::optional<Run> of(const std::byte* data, size_t bytes);

  int version() const { return version_; }
  // The last 16 bits of the destination's address, and those of the address before them.
  uint32_t destination() const;
  const std::byte* destinationAddress() const { return packet_ + (version_ == 4 ? 16 : 24); }

  int64_t packets() const { return packets_; }
  // Bytes of `count` packets from packet `first` on, with their headers, as they are on the line.
  int64_t bytesOf(int64_t first, int64_t count) const;
  Piece piece(int64_t first, int64_t count) const;

 private:
  const std::byte* packet_ = nullptr;  // the IP header
  size_t bytes_ = 0;
  Offload offload_;
  int version_ = 4;
  int64_t packets_ = 1;
  size_t headers_ = 0;  // of a run of several: IP's and TCP's, which each packet has
};

}  // namespace wan
