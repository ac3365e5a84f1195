// CRC-32C (Castagnoli): the checksum of data on its way (RINGREDUCE_CHECKSUM).
//
// The processor's own instruction is used where there is one (SSE 4.2 on x86-64, the CRC extension
// on aarch64), which is seen when the program runs; tables everywhere else.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringreduce::net {

// The checksum of all bytes so far, `sum` being that of those before these; of none it is 0.
uint32_t crc32c(uint32_t sum, const void* data, size_t bytes);

// The same by tables alone, and whether crc32c uses the instruction: for tests.
uint32_t crc32cByTables(uint32_t sum, const void* data, size_t bytes);
bool crc32cInHardware();

}  // namespace ringreduce::net
