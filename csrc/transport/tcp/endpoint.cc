// Endpoints as text.
#include <algorithm>
#include <sstream>

#include "base/error.h"
#include "transport/tcp/acceptor.h"

namespace ringreduce::net {
namespace {

// Whether this is an address but for the interface that it names.
bool isOfInterfaceElsewhere(const std::string& word) {
  const size_t percent = word.find('%'), end = word.find(']');
  if (percent == std::string::npos || end == std::string::npos || percent > end) return false;
  return Address::parse(word.substr(0, percent) + word.substr(end)).has_value();
}

}  // namespace

std::string Endpoint::text() const {
  std::string text;
  for (const Address& address : addresses) {
    if (!text.empty()) text += ' ';
    text += address.text();
  }
  return text;
}

Endpoint Endpoint::fromText(const std::string& text) {
  Endpoint endpoint;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const auto address = Address::parse(word);
    if (!address && isOfInterfaceElsewhere(word)) continue;
    if (!address || address->port() == 0)
      throw Error(Failure::kSetup, "a rank gave '" + word + "' as an address, which is none");
    if (std::none_of(endpoint.addresses.begin(), endpoint.addresses.end(),
                     [&](const Address& other) {
                       return other.sameHost(*address) && other.port() == address->port();
                     }))
      endpoint.addresses.push_back(*address);
  }
  if (endpoint.addresses.empty())
    throw Error(Failure::kSetup,
                "a rank gave no address that can be reached from this host ('" + text +
                    "'); choose an interface with others on its host (RINGREDUCE_IF)");
  return endpoint;
}

}  // namespace ringreduce::net
