// Which of this machine's addresses to be reached at: the list of RINGREDUCE_IF, and what is done
// without one.
#include <fnmatch.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <sstream>

#include "base/error.h"
#include "base/text.h"
#include "transport/tcp/address.h"

namespace ringreduce::net {
namespace {

// One of the list: an interface by name, or a network.
struct Term {
  bool excludes = false;
  std::string name;                // may hold * and ?
  std::optional<Address> network;  // if it is not a name
  int prefix = 0;

  bool fits(const Interface& interface) const {
    if (!network) return fnmatch(name.c_str(), interface.name.c_str(), 0) == 0;
    return network->sameNetwork(interface.address, prefix);
  }
};

[[noreturn]] void refuse(const std::string& wanted, const std::string& item) {
  throw Error(Failure::kSetup,
              "RINGREDUCE_IF=" + wanted + ": '" + item +
                  "' is neither an interface's name, nor a network such as 10.0.0.0/8 or "
                  "fd00::/8; correct or unset it");
}

Term termOf(const std::string& item, const std::string& wanted) {
  Term term;
  term.excludes = item[0] == '^';
  const std::string text = item.substr(term.excludes ? 1 : 0);
  const size_t slash = text.find('/');
  term.network = Address::parseHost(text.substr(0, slash));
  if (term.network) term.prefix = term.network->bits();
  if (slash != std::string::npos) {
    const std::string bits = text.substr(slash + 1);
    const bool digits = !bits.empty() && bits.size() <= 3 &&
                        bits.find_first_not_of("0123456789") == std::string::npos;
    if (!term.network || !digits || std::atoi(bits.c_str()) > term.prefix) refuse(wanted, item);
    term.prefix = std::atoi(bits.c_str());
  } else if (!term.network) {
    if (text.empty() || text.find_first_of(" :^") != std::string::npos) refuse(wanted, item);
    term.name = text;
  }
  return term;
}

std::vector<Term> termsOf(const std::string& wanted) {
  std::vector<Term> terms;
  std::istringstream items(wanted);
  for (std::string item; std::getline(items, item, ',');) {
    item.erase(0, item.find_first_not_of(" \t"));
    item.erase(item.find_last_not_of(" \t") + 1);
    if (!item.empty()) terms.push_back(termOf(item, wanted));
  }
  if (terms.empty() && !wanted.empty()) refuse(wanted, wanted);  // nothing but commas and blanks
  return terms;
}

// Bridges and pairs that container and virtual machine runtimes make: other hosts often have one of
// the same address.
bool isOfThisHostOnly(const std::string& name) {
  static constexpr const char* kNames[] = {"docker*", "br-*",  "veth*",    "virbr*", "vnet*",
                                           "cni*",    "cali*", "flannel*", "lxc*",   "podman*"};
  return std::any_of(std::begin(kNames), std::end(kNames),
                     [&](const char* pattern) { return fnmatch(pattern, name.c_str(), 0) == 0; });
}

std::string listOf(const std::vector<Interface>& all) {
  if (all.empty()) return "no interface with an address";
  return joined(all, ", ", [](const Interface& one) {
    return one.name + " (" + one.address.hostText() + "/" + std::to_string(one.prefix) +
           (one.up ? ")" : ", down)");
  });
}

struct Candidate {
  const Interface* interface = nullptr;
  size_t term = 0;          // the first of the list that it fits
  bool by_network = false;  // which is a network or an address

  bool isLinkLocal() const { return interface->address.isLinkLocal() && !by_network; }
};

// Keeps those that are better, if there are any.
template <class Better>
void prefer(std::vector<Candidate>& candidates, Better better) {
  if (std::any_of(candidates.begin(), candidates.end(), better))
    std::erase_if(candidates, [&](const Candidate& one) { return !better(one); });
}

// Puts those that are better first, and otherwise leaves the order.
template <class Better>
void putFirst(std::vector<Candidate>& candidates, Better better) {
  std::stable_partition(candidates.begin(), candidates.end(), better);
}

}  // namespace

std::vector<Address> choose(const std::vector<Interface>& all, const std::string& wanted,
                            const std::optional<Address>& towards) {
  const std::vector<Term> terms = termsOf(wanted);
  const auto includes = [](const Term& term) { return !term.excludes; };
  const bool named = std::any_of(terms.begin(), terms.end(), includes);

  std::vector<Candidate> candidates;
  bool only_loopback = true;
  std::string way;  // the interface by which the store's host is reached
  for (const Interface& one : all) {
    if (!one.up) continue;
    only_loopback = only_loopback && one.loopback;
    if (towards && one.address.sameHost(*towards)) way = one.name;
    const auto fits = [&](bool excluding) {
      return std::find_if(terms.begin(), terms.end(), [&](const Term& term) {
        return term.excludes == excluding && term.fits(one);
      });
    };
    const auto term = fits(false);
    if (fits(true) != terms.end() || (named && term == terms.end())) continue;
    candidates.push_back({.interface = &one,
                          .term = static_cast<size_t>(term - terms.begin()),
                          .by_network = term != terms.end() && term->network.has_value()});
  }

  const auto isReal = [](const Candidate& one) { return !one.interface->loopback; };
  const auto isOnTheWay = [&](const Candidate& one) { return one.interface->name == way; };
  prefer(candidates, isReal);
  if (!named && !only_loopback) std::erase_if(candidates, std::not_fn(isReal));
  prefer(candidates, [](const Candidate& one) { return !one.isLinkLocal(); });
  if (!named) {
    prefer(candidates, isOnTheWay);
    prefer(candidates, [](const Candidate& one) { return !isOfThisHostOnly(one.interface->name); });
  }

  // The least weighty first: each later sorting goes before those above it.
  putFirst(candidates,
           [](const Candidate& one) { return one.interface->address.family() == AF_INET; });
  putFirst(candidates, [&](const Candidate& one) {
    return towards && one.interface->address.sameHost(*towards);
  });
  putFirst(candidates, isOnTheWay);
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.term < b.term; });

  std::vector<Address> chosen;
  for (const Candidate& one : candidates)
    if (chosen.size() < kMostAddresses &&
        std::none_of(chosen.begin(), chosen.end(),
                     [&](const Address& other) { return other.sameHost(one.interface->address); }))
      chosen.push_back(one.interface->address);
  if (!chosen.empty()) return chosen;
  throw Error(Failure::kSetup,
              (terms.empty() ? "this host has no address to be reached at"
                             : "RINGREDUCE_IF=" + wanted + " leaves no address to be reached at") +
                  "; it has " + listOf(all) +
                  "; set RINGREDUCE_IF to the name or network of one that is up");
}

}  // namespace ringreduce::net
