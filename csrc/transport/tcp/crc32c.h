// CRC-32C (Castagnoli): the checksum of frame headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringreduce::net {

uint32_t crc32c(const void* data, size_t bytes);

}  // namespace ringreduce::net
