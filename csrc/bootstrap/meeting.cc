// Messages, identities, the stopwatch.
#include "bootstrap/meeting.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "base/config.h"
#include "base/error.h"
#include "base/text.h"

namespace ringreduce {

std::string encode(const Fields& fields) {
  std::string text;
  for (const auto& [key, value] : fields) {
    text += key + '=';
    for (char c : value) text += c == '\n' ? ' ' : c;
    text += '\n';
  }
  return text;
}

Fields decode(const std::string& text) {
  Fields fields;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (const size_t at = line.find('='); at != std::string::npos)
      fields[line.substr(0, at)] = line.substr(at + 1);
  return fields;
}

int64_t number(const Fields& fields, const char* key) {
  const auto found = fields.find(key);
  if (found == fields.end() || found->second.empty()) return -1;
  char* end = nullptr;
  const long value = std::strtol(found->second.c_str(), &end, 10);
  return *end || value < 0 ? -1 : value;
}

std::string word(const Fields& fields, const char* key) {
  const auto found = fields.find(key);
  return found == fields.end() ? "" : found->second;
}

std::string randomHex() {
  std::array<unsigned char, 32> bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throwErrno(Failure::kSetup, "no random numbers to be had");
  return hexText(bytes);
}

bool sameSecret(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  int difference = 0;  // looks at every byte, so that time tells nothing
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

std::string hostName() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

std::string hostId() {
  if (const std::string posed = Config::read().host_id.get(); !posed.empty()) return posed;
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char ns[64] = {};
  if (readlink("/proc/self/ns/net", ns, sizeof ns - 1) < 0) ns[0] = 0;
  return boot + ns;
}

Stopwatch::Stopwatch(const GroupOptions& options)
    : options_(options), started_(now()), next_report_(deadlineIn(options.stall)) {}

void Stopwatch::report(int rank, const std::string& missing) {
  next_report_ = now() + std::max<Nanos>(waited(), kSecond);
  log("rank " + std::to_string(rank) + ", making group '" + options_.name + "', has waited " +
      seconds(waited()) + " for " + missing);
}

}  // namespace ringreduce
