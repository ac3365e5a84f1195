// What a fuzz target makes of its input: numbers and bytes, until there are no more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : bytes_(reinterpret_cast<const char*>(data), size) {}
  bool ended() const { return bytes_.empty(); }
  uint8_t byte() { return ended() ? uint8_t{0} : static_cast<uint8_t>(bytes(1)[0]); }
  size_t below(size_t bound) { return byte() % bound; }
  std::string_view bytes(size_t most) {
    const std::string_view part = bytes_.substr(0, most);
    bytes_.remove_prefix(part.size());
    return part;
  }

 private:
  std::string_view bytes_;
};

}  // namespace fuzz
