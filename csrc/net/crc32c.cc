// Three checksums at a time: the instruction takes a word each cycle, but its result three cycles
// later.  Three parts of a block are summed side by side and then joined: the sum of a part
// followed by n zero bytes is a linear function of its sum, kept as tables.
#include "net/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define RINGREDUCE_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#if defined(__clang__)
// Its arm_acle.h has them only where the whole file is compiled for such processors.
#define RINGREDUCE_CRC_TARGET __attribute__((target("crc")))
#define __crc32cd __builtin_arm_crc32cd
#define __crc32cb __builtin_arm_crc32cb
#else
#define RINGREDUCE_CRC_TARGET __attribute__((target("+crc")))
#endif
#endif

namespace ringreduce::net {
namespace {

using Table = std::array<uint32_t, 256>;

// kBytes[k][b]: the sum of byte b followed by k zero bytes.
constexpr std::array<Table, 8> kBytes = [] {
  std::array<Table, 8> tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t sum = b;
    for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ (sum & 1 ? 0x82f63b78u : 0);
    tables[0][b] = sum;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t b = 0; b < 256; ++b)
      tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 255];
  return tables;
}();

uint64_t word(const unsigned char* data) {  // both architectures are little-endian
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// These work on sums before the last inversion.
using Continue = uint32_t (*)(uint32_t, const unsigned char*, size_t);

uint32_t byTables(uint32_t sum, const unsigned char* data, size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    const uint64_t next = word(data) ^ sum;
    sum = 0;
    for (size_t i = 0; i < 8; ++i) sum ^= kBytes[7 - i][next >> 8 * i & 255];
  }
  for (; bytes > 0; --bytes) sum = sum >> 8 ^ kBytes[0][(sum ^ *data++) & 255];
  return sum;
}

#ifdef RINGREDUCE_CRC_TARGET

constexpr size_t kPart = 1024;  // of a block of three

// kZeros[i][b]: what byte i of a sum, being b, becomes by kPart zero bytes.
constexpr std::array<Table, 4> kZeros = [] {
  // The columns of that function, by squaring that of one zero byte.
  std::array<uint32_t, 32> columns{};
  for (size_t bit = 0; bit < 32; ++bit) {
    const uint32_t sum = uint32_t{1} << bit;
    columns[bit] = sum >> 8 ^ kBytes[0][sum & 255];
  }
  for (size_t zeros = 1; zeros < kPart; zeros *= 2) {
    std::array<uint32_t, 32> twice{};
    for (size_t bit = 0; bit < 32; ++bit)
      for (size_t of = 0; of < 32; ++of)
        if (columns[bit] >> of & 1) twice[bit] ^= columns[of];
    columns = twice;
  }
  std::array<Table, 4> tables{};
  for (size_t i = 0; i < 4; ++i)
    for (uint32_t b = 0; b < 256; ++b)
      for (size_t bit = 0; bit < 8; ++bit)
        if (b >> bit & 1) tables[i][b] ^= columns[8 * i + bit];
  return tables;
}();

uint32_t afterZeros(uint32_t sum) {
  return kZeros[0][sum & 255] ^ kZeros[1][sum >> 8 & 255] ^ kZeros[2][sum >> 16 & 255] ^
         kZeros[3][sum >> 24];
}

#if defined(__x86_64__)
RINGREDUCE_CRC_TARGET inline uint64_t addWord(uint64_t sum, uint64_t word) {
  return _mm_crc32_u64(sum, word);
}
RINGREDUCE_CRC_TARGET inline uint64_t addByte(uint64_t sum, unsigned char byte) {
  return _mm_crc32_u8(static_cast<uint32_t>(sum), byte);
}
bool hasInstruction() {
  return __builtin_cpu_supports("sse4.2");
}
#else
RINGREDUCE_CRC_TARGET inline uint64_t addWord(uint64_t sum, uint64_t word) {
  return __crc32cd(static_cast<uint32_t>(sum), word);
}
RINGREDUCE_CRC_TARGET inline uint64_t addByte(uint64_t sum, unsigned char byte) {
  return __crc32cb(static_cast<uint32_t>(sum), byte);
}
bool hasInstruction() {
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}
#endif

RINGREDUCE_CRC_TARGET uint32_t byInstruction(uint32_t sum, const unsigned char* data,
                                             size_t bytes) {
  uint64_t first = sum;
  for (; bytes >= 3 * kPart; data += 3 * kPart, bytes -= 3 * kPart) {
    uint64_t second = 0, third = 0;
    for (size_t at = 0; at < kPart; at += 8) {
      first = addWord(first, word(data + at));
      second = addWord(second, word(data + kPart + at));
      third = addWord(third, word(data + 2 * kPart + at));
    }
    const uint32_t two = afterZeros(static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
    first = afterZeros(two) ^ static_cast<uint32_t>(third);
  }
  for (; bytes >= 8; data += 8, bytes -= 8) first = addWord(first, word(data));
  for (; bytes > 0; --bytes) first = addByte(first, *data++);
  return static_cast<uint32_t>(first);
}

#else

bool hasInstruction() {
  return false;
}
constexpr Continue byInstruction = byTables;

#endif

uint32_t sumBy(Continue how, uint32_t sum, const void* data, size_t bytes) {
  return ~how(~sum, static_cast<const unsigned char*>(data), bytes);
}

}  // namespace

bool crc32cInHardware() {
  static const bool has = hasInstruction();
  return has;
}

uint32_t crc32c(uint32_t sum, const void* data, size_t bytes) {
  return sumBy(crc32cInHardware() ? byInstruction : byTables, sum, data, bytes);
}

uint32_t crc32cByTables(uint32_t sum, const void* data, size_t bytes) {
  return sumBy(byTables, sum, data, bytes);
}

}  // namespace ringreduce::net
