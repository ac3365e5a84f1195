// Making a group between hosts: what all wish is compared, the control ring connected, and the
// group agreed upon by all ranks or none.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "bootstrap/meeting.h"
#include "group/network.h"
#include "transport/places.h"

namespace ringreduce {
namespace {

// How long the reason of a rank that gave up making the group may take to be in the store.
constexpr Nanos kReasonDelay = kSecond;

// Another rank gave up making the group, and this is why.
struct Told final : std::exception {
  explicit Told(std::string t) : text(std::move(t)) {}
  const char* what() const noexcept override { return text.c_str(); }
  std::string text;
};

// A store whose user, who looks into it again and again, looks after something else as well.
class LookingStore final : public Store {
 public:
  LookingStore(Store& store, std::function<void()> turn) : store_(store), turn_(std::move(turn)) {}
  void set(const std::string& key, const std::string& value) override { store_.set(key, value); }
  std::optional<std::string> get(const std::string& key) override {
    turn_();
    return store_.get(key);
  }
  void remove(const std::string& key) override { store_.remove(key); }

 private:
  Store& store_;
  const std::function<void()> turn_;
};
}  // namespace

void Network::join(const Hosts& hosts, Store& store, const std::function<void(Store&)>& local) {
  const std::string key = "ringreduce/" + word_ + "/failed";
  Stopwatch stopwatch(options_);
  Nanos next_look = 0;
  std::string missing = "a rank before " + who_[static_cast<size_t>(rank_)] + " did not connect";
  const auto turn = [&] {
    stopwatch.turn(options_.shownAs(rank_), [&] { return "the control ring to be closed"; });
    if (now() >= next_look) {
      next_look = now() + kTick;
      if (const auto text = store.get(key)) throw Told(*text);
    }
    if (stopwatch.over())
      throw Error(Failure::kTimeout, "the control ring of group '" + options_.name +
                                         "' was not closed within " + seconds(options_.timeout) +
                                         ": " + missing);
  };
  const std::string& me = who_[static_cast<size_t>(rank_)];
  // Leaves the reason for the others, but for what only follows from theirs.
  const auto giveUp = [&](const std::string& text) {
    std::optional<std::string> theirs;
    try {
      theirs = store.get(key);
    } catch (const std::exception& error) {
      log(me + " cannot look why others gave up: " + error.what());
    }
    if (theirs) return theirs;
    try {
      store.set(key, text);
    } catch (const std::exception& error) {
      log(me + " cannot tell the others of group '" + options_.name +
          "' why it gave up: " + error.what());
    }
    return theirs;
  };
  const auto told = [&](const std::string& text) {
    return Error(Failure::kSetup, text + ", learned by rank " + options_.shown(rank_));
  };
  try {
    turn();
    connect(hosts, turn);
    host_ring_ = findRing(hosts, store, turn);
    if (!host_ring_.ranks.empty()) places_ = placesOf(host_ring_.ranks);
    LookingStore looking(store, turn);
    local(looking);
    missing = "a rank did not finish what those of its host make together";
    lookAtWires();
    agree(turn);
    slowest_.putInto(cost_);
    if (rank_ == 0) forgetRing(store);
  } catch (const Told& theirs) {
    throw told(theirs.text);
  } catch (const Error& error) {
    const std::string text = me + ": " + error.what();
    if (const auto theirs = giveUp(text)) throw told(*theirs);
    throw Error(error.kind(), text);
  } catch (const std::exception& error) {
    giveUp(me + ": " + error.what());
    throw;
  } catch (...) {
    giveUp(me + ": interrupted while the group was made");
    throw;
  }
}

// What all have told.  Throws, on all ranks, if some want encryption and others do not.
void Network::readOptions(const Hosts& hosts) {
  std::optional<int> encrypted, plain;
  for (int r = size_ - 1; r >= 0; --r) {
    shared_ = SharedOptions::fromText(toldPart(hosts, r, 1));
    (shared_.encrypted ? encrypted : plain) = r;
  }
  if (encrypted && plain)
    throw Error(Failure::kSetup, "RINGREDUCE_TLS=1 is set on " +
                                     who_[static_cast<size_t>(*encrypted)] + " and not on " +
                                     who_[static_cast<size_t>(*plain)] +
                                     ": nothing was sent; set it on all ranks or on none");
  for (int r = 0; r < size_; ++r)
    endpoints_.push_back(net::Endpoint::fromText(toldPart(hosts, r, 0)));
}

void Network::connect(const Hosts& hosts, const std::function<void()>& turn) {
  readOptions(hosts);
  compareWishes(hosts);
  // Ranks of a host are neighbours, so that a host that is cut off is one stretch of the ring.
  for (int host = 0; host < hosts.count(); ++host) {
    const std::vector<int>& ranks = hosts.ranksOn(host);
    ring_.insert(ring_.end(), ranks.begin(), ranks.end());
    ranks_on_host_ = std::max(ranks_on_host_, static_cast<int>(ranks.size()));
  }
  pump_ = net::Pump::start(
      reactor_, rank_, size_,
      [this](int to, int, const std::function<void()>& each_turn) {
        return dial(to, net::Purpose::kMessages, 0, each_turn);
      },
      *this);
  carrier_ = pump_.get();

  const auto place = static_cast<size_t>(std::ranges::find(ring_, rank_) - ring_.begin());
  const size_t P = ring_.size();
  if (P == 1) return;
  const int next = ring_[(place + 1) % P], previous = ring_[(place + P - 1) % P];
  next_ = dial(next, net::Purpose::kControl, 0, turn);
  previous_ = awaitEarly(previous, net::Purpose::kControl, turn);
}

// A connection that another rank makes while the group is made.
net::Socket Network::awaitEarly(int from, net::Purpose purpose, const std::function<void()>& turn) {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      const auto found = std::find_if(early_.begin(), early_.end(), [&](const Early& e) {
        return e.caller.purpose == purpose && e.caller.from == from;
      });
      if (found != early_.end()) {
        net::Socket socket = std::move(found->socket);
        early_.erase(found);
        return socket;
      }
    }
    lookAtNext(turn);
    turn();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// A word goes twice around the control ring: first when each rank has done its part, and then for
// all to know that.  With it goes the cost of the slowest wires between neighbours, so all have the
// same after the second time.  Whoever gives up ends its connections, so that its neighbours see it
// at once.
void Network::agree(const std::function<void()>& turn) {
  const auto place = static_cast<size_t>(std::ranges::find(ring_, rank_) - ring_.begin());
  const size_t P = ring_.size();
  if (P == 1) return;
  const int next = ring_[(place + 1) % P], previous = ring_[(place + P - 1) % P];
  const auto pass = [&](char round) {
    const std::string word = round + slowest_.text();
    for (size_t sent = 0; sent < word.size();) {
      const ssize_t n = next_.send(&word[sent], word.size() - sent);
      if (n > 0) {
        sent += static_cast<size_t>(n);
        continue;
      }
      if (errno != EINTR && errno != EAGAIN) gaveUp(next, turn);
      turn();
    }
  };
  const auto await = [&](char round) {
    std::string word(1 + slowest_.text().size(), 0);
    for (size_t got = 0;;) {
      const ssize_t n = previous_.receive(&word[got], word.size() - got);
      if (n > 0) {
        if (word[0] != round)
          throw Error(Failure::kSetup, who_[static_cast<size_t>(previous)] +
                                           " sent what no rank does while the group was made");
        got += static_cast<size_t>(n);
        if (got == word.size()) return slowest_.take(word.substr(1));
        continue;
      }
      if (n == 0 || (errno != EINTR && errno != EAGAIN)) gaveUp(previous, turn);
      lookAtNext(turn);
      turn();
      pollfd wanted{.fd = previous_.get(), .events = POLLIN, .revents = 0};
      poll(&wanted, 1, 5);
    }
  };
  const bool first = place == 0, last = place + 1 == P;
  for (const char round : {1, 2}) {
    if (!first) await(round);
    if (round == 1 || !last) pass(round);
    if (first && round == 1) await(round);
  }
}

// Throws if the next rank has given up.  Nothing is taken from the connection, encrypted or not.
void Network::lookAtNext(const std::function<void()>& turn) const {
  char word = 0;
  const ssize_t n = recv(next_.get(), &word, 1, MSG_DONTWAIT | MSG_PEEK);
  if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN))
    gaveUp(ring_[static_cast<size_t>(std::ranges::find(ring_, rank_) - ring_.begin() + 1) %
                 ring_.size()],
           turn);
}

// `turn` throws what it has told the others, which may take a moment to be read.
void Network::gaveUp(int rank, const std::function<void()>& turn) const {
  for (const Nanos until = deadlineIn(kReasonDelay); now() < until;) {
    turn();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  throw Error(Failure::kSetup, who_[static_cast<size_t>(rank)] +
                                   " ended its connection while the group was made, without a "
                                   "word why: look whether its process has ended");
}
}  // namespace ringreduce
