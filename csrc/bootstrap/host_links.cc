// Opening, the control ring, the order of the data ring, and the agreement of all ranks.
#include "bootstrap/host_links.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "base/config.h"
#include "base/error.h"
#include "base/limits.h"
#include "base/text.h"
#include "bootstrap/attempt.h"
#include "bootstrap/host_memory.h"
#include "transport/tcp/connector.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/survey.h"
#include "transport/tcp/tcp_transport.h"

namespace ringreduce {
namespace {

constexpr size_t kMostPaths = 4;
// Descriptors that a transport needs besides its connections.
constexpr int kTransportFds = 2;
constexpr char kEndedConnection[] =
    " ended its connection while the group was made, without a word why: look whether its process "
    "has ended";
// The period of polling the store for a value of another rank.
constexpr Nanos kStorePoll = 10 * kMillisecond;

static_assert(Config::kMostLanes == kMaxConnections);

// The addresses of a rank to spread its data over: those of the best one's family, since an
// interface may have addresses of both.
std::vector<size_t> pathsOf(const net::Endpoint& endpoint) {
  std::vector<size_t> paths;
  for (size_t i = 0; i < endpoint.addresses.size(); ++i)
    if (endpoint.addresses[i].family() == endpoint.addresses[0].family()) paths.push_back(i);
  return paths;
}

// The settings that a rank gave to the others: its address, its options, RINGREDUCE_RING, and its
// options for the group of its host's ranks.
enum Part { kAddress, kOptions, kRingSetting, kLocalOptions };
std::string settingOf(const Hosts& hosts, int rank, int part) {
  std::string rest = hosts.settingsOf(rank);
  for (; part > 0; --part) rest.erase(0, rest.find('|') + 1);
  return rest.substr(0, rest.find('|'));
}

// The reason why another rank gave up making the group.
struct RemoteFailure final : std::exception {
  explicit RemoteFailure(const std::string& stored) {
    const Fields fields = decode(stored);
    reason = {kindOf(fields), fieldOf(fields, "text")};
    culprit = static_cast<int>(std::max<int64_t>(0, number(fields, "culprit")));
  }
  const char* what() const noexcept override { return reason.text.c_str(); }
  Reason reason;
  int culprit = 0;
};

// Ends a wait of join(): at the deadline, by Ctrl-C, or when another rank has left its reason.
//
// A rank does not know whether the one that it waits for waits as well.  So the first rank whose
// deadline passes asks through the store, and each rank that waits answers with the rank that it
// waits for.  From answer to answer that leads to the rank that does not answer: its process is
// stopped, or it is late itself.  All ranks then raise the same error.
class JoinGuard {
 public:
  // `waits_for`: the rank that this one waits for.
  JoinGuard(Store& store, const GroupOptions& options, const std::string& nonce,
            const std::vector<std::string>& who, int rank, const int& waits_for)
      : store_(store),
        options_(options),
        reason_key_(reasonKey(nonce)),
        prefix_("ringreduce/" + nonce + "/"),
        who_(who),
        rank_(rank),
        waits_for_(waits_for),
        clock_(options, rank) {}

  void poll() {
    clock_.poll([&] { return nameOf(waits_for_); });
    if (AttemptClock::due(next_look_)) {
      if (const auto text = store_.get(reason_key_)) throw RemoteFailure(*text);
      const bool may_be_asked = clock_.waited() >= limits::kUnasked;
      if (asked_since_ == 0 && may_be_asked && store_.get(questionKey())) asked_since_ = now();
      if (asked_since_ != 0) answer();
    }
    if (!clock_.over()) return;
    if (asked_since_ == 0) {  // others may ask at the same time, and set the same
      store_.set(questionKey(), "1");
      asked_since_ = now();
      answer();
    }
    if (now() - asked_since_ >= limits::kStoreQuestion) giveUp();
  }

  // Stores the reason for the others, unless another rank stored one first; throws that one.
  void leaveReason(const Reason& reason, int culprit) {
    const std::string own = encode(reason, culprit);
    std::string stored = own;
    try {
      stored = storeReason(store_, reason_key_, own);
    } catch (const std::exception& error) {  // the first error matters more
      log(nameOf(rank_) + " cannot tell the others of group '" + options_.name +
          "' why it gave up: " + error.what());
    }
    if (stored != own) throw RemoteFailure(stored);
  }

  // Once the group is made.
  void cleanUp() {
    if (asked_since_ == 0) return;
    store_.remove(questionKey());
    store_.remove(answerKey(rank_));
  }

  int culprit() const { return culprit_; }

 private:
  std::string questionKey() const { return prefix_ + "late"; }
  std::string answerKey(int rank) const { return prefix_ + "waits/" + std::to_string(rank); }
  const std::string& nameOf(int rank) const { return who_[static_cast<size_t>(rank)]; }
  bool isRank(int rank) const { return rank >= 0 && rank < static_cast<int>(who_.size()); }

  void answer() {
    if (answered_ == waits_for_) return;
    answered_ = waits_for_;
    store_.set(answerKey(rank_), std::to_string(waits_for_));
  }

  [[noreturn]] void giveUp() {
    const std::vector<int> late = findLate();
    std::string text;
    for (const int r : late) text += (text.empty() ? "" : ", ") + nameOf(r);
    if (late.empty())
      text = nameOf(waits_for_) + " did not do its part in time";
    else
      text += late.size() == 1 ? " does not answer: its process is stopped, or it is late"
                               : " do not answer: their processes are stopped, or they are late";
    culprit_ = late.empty() ? waits_for_ : late.front();
    throw Error(Failure::kTimeout, text + "; group '" + options_.name + "' was not made within " +
                                       seconds(options_.timeout));
  }

  // The ranks that the others wait for.
  std::vector<int> findLate() {
    int at = waits_for_;
    for (size_t steps = 0; steps < who_.size() && isRank(at) && at != rank_; ++steps) {
      const auto answer = store_.get(answerKey(at));
      if (!answer) return {at};
      at = static_cast<int>(number({{"rank", *answer}}, "rank"));
    }
    std::vector<int> late;
    for (int r = 0; isRank(r); ++r)
      if (r != rank_ && !store_.get(answerKey(r))) late.push_back(r);
    return late;
  }

  Store& store_;
  const GroupOptions& options_;
  const std::string reason_key_, prefix_;
  const std::vector<std::string>& who_;
  const int rank_;
  const int& waits_for_;
  AttemptClock clock_;
  Nanos next_look_ = 0, asked_since_ = 0;
  int answered_ = -2;
  int culprit_ = 0;
};

std::string await(Store& store, const std::string& key, const HostLinks::Poll& poll) {
  for (;;) {
    if (const auto text = store.get(key)) return *text;
    poll();
    AttemptClock::sleep(kStorePoll);
  }
}

std::string ringKey(const std::string& nonce) {
  return "ringreduce/" + nonce + "/ring";
}

std::string rateKey(const std::string& nonce, int host) {
  return ringKey(nonce) + "/" + std::to_string(host);
}

}  // namespace

SharedOptions HostLinks::localOptions(const Hosts& hosts) {
  return SharedOptions::fromText(settingOf(hosts, hosts.localRanks().front(), kLocalOptions));
}

std::string HostLinks::open(const Hosts& hosts) {
  // Called again if the rendezvous starts over.
  admitted_.reset();
  early_.clear();
  who_.clear();
  rank_ = hosts.rank();
  size_ = hosts.size();
  nonce_ = hosts.nonce();
  secret_ = net::secretFromText(hosts.secret());
  for (int r = 0; r < size_; ++r) who_.push_back(hosts.who(r));
  shared_ = options_.chosenShared(size_);
  shared_.validate(size_);
  // Errors in this rank's settings are thrown here, where the other ranks learn of them.
  const Config config = Config::read();
  congestion_ = config.congestion.get();
  net::checkCongestion(congestion_);
  connections_ = static_cast<int>(config.lanes.get());
  lost_after_ = static_cast<Nanos>(config.lost_seconds.get() * static_cast<double>(kSecond));
  config.log.get();
  reactor_ = net::Reactor::shared();
  acceptor_ = net::Acceptor::shared(options_.store_host);
  if (logsInfo())
    log(who(rank_) + " of group '" + options_.name + "' is reached at " + acceptor_->choice());
  admitted_ = acceptor_->admit(
      nonce_, rank_, secret_,
      [this](net::Socket socket, const net::PeerHello& caller) { take(std::move(socket), caller); },
      shared_.encrypted);
  ring_setting_ = config.ring.get();
  RingSetting::fromText(ring_setting_);
  agreed_cost_ = AgreedWireCost::fromEnvironment();
  const int here = static_cast<int>(hosts.localRanks().size());
  SharedOptions local = options_.choosesShared() ? shared_ : SharedOptions::fromEnvironment(here);
  local.on_loss = OnLoss::kError;  // a group that survives losses has no groups of a host
  return acceptor_->endpoint().text() + "|" + shared_.toText() + "|" + ring_setting_ + "|" +
         local.toText();
}

size_t HostLinks::mostPaths() const {
  size_t most = 1;
  for (const net::Endpoint& endpoint : endpoints_)
    most = std::max(most, std::min(kMostPaths, pathsOf(endpoint).size()));
  return most;
}

void HostLinks::join(const Hosts& hosts, Store& store,
                     const std::function<void(const LocalPoll&)>& local) {
  const std::string& me = who(rank_);
  JoinGuard guard(store, options_, nonce_, who_, rank_, waits_for_);
  const Poll poll = [&] { guard.poll(); };
  const auto fail = [&](const Reason& reason, int culprit) {
    if (in_last_round_) failure_of_last_round_ = {reason.kind, culprit, rank_, reason.text};
    return Error(reason.kind, reason.text);
  };
  const auto learned = [&](const RemoteFailure& theirs) {
    return fail(
        {theirs.reason.kind, theirs.reason.text + ", learned by rank " + options_.shown(rank_)},
        theirs.culprit);
  };
  try {
    poll();
    connect(hosts, poll);
    host_ring_ = findRing(hosts, store, poll);
    local([&](int late) {
      waits_for_ = hosts.localRanks()[static_cast<size_t>(late)];
      checkNext(poll);
      poll();
    });
    measureWires();
    reserveDescriptors();
    agree(poll);
    agreed_cost_.applyTo(cost_);
    if (rank_ == 0 && hosts.count() > 1 && logsInfo())
      log("group '" + options_.name + "': " + agreed_cost_.describe());
    if (rank_ == 0 && host_ring_.source == HostRing::Source::kMeasured)
      store.remove(ringKey(nonce_));
    guard.cleanUp();
  } catch (const RemoteFailure& theirs) {
    throw learned(theirs);
  } catch (const Error& error) {
    const bool names_late = error.kind() == Failure::kTimeout;
    const Reason reason{error.kind(), names_late ? std::string(error.what()) +
                                                       "; noticed by rank " + options_.shown(rank_)
                                                 : me + ": " + error.what()};
    try {
      guard.leaveReason(reason, guard.culprit());
    } catch (const RemoteFailure& theirs) {
      throw learned(theirs);
    }
    throw fail(reason, names_late ? guard.culprit() : rank_);
  } catch (...) {  // the store, or Ctrl-C
    const Reason reason = reasonOf(std::current_exception(), me);
    try {
      guard.leaveReason(reason, rank_);
    } catch (const RemoteFailure&) {  // this rank's own error matters more to it
    }
    fail(reason, rank_);
    throw;
  }
}

void HostLinks::leave(Store& store) const {
  if (rank_ == 0)
    awaitReaders(store, nonce_, size_, options_);
  else
    confirmReason(store, nonce_, rank_, options_);
}

// Reads the settings of all ranks.  Throws, on all ranks, if only some want encryption.
void HostLinks::readOptions(const Hosts& hosts) {
  std::optional<int> encrypted, plain;
  for (int r = size_ - 1; r >= 0; --r) {
    shared_ = SharedOptions::fromText(settingOf(hosts, r, kOptions));
    (shared_.encrypted ? encrypted : plain) = r;
  }
  if (encrypted && plain)
    throw Error(Failure::kSetup, "RINGREDUCE_TLS=1 is set on " + who(*encrypted) + " and not on " +
                                     who(*plain) +
                                     ": nothing was sent; set it on all ranks or on none");
  for (int r = 0; r < size_; ++r)
    endpoints_.push_back(net::Endpoint::fromText(settingOf(hosts, r, kAddress)));
}

void HostLinks::connect(const Hosts& hosts, const Poll& poll) {
  readOptions(hosts);
  compareRingSettings(hosts);
  // Ranks of a host are neighbours, so that a host that is cut off is one stretch of the ring.
  for (int host = 0; host < hosts.count(); ++host) {
    const std::vector<int>& ranks = hosts.ranksOn(host);
    ring_.insert(ring_.end(), ranks.begin(), ranks.end());
    ranks_on_host_ = std::max(ranks_on_host_, static_cast<int>(ranks.size()));
  }
  if (size_ == 1) return;
  const int next = ringNeighbour(1), previous = ringNeighbour(-1);
  waits_for_ = next;
  next_ = dial(next, net::Purpose::kControl, 0, poll);
  previous_ = awaitEarly(previous, net::Purpose::kControl, poll);
}

int HostLinks::ringNeighbour(int step) const {
  const auto position = std::ranges::find(ring_, rank_) - ring_.begin();
  return ring_[static_cast<size_t>(position + step + size_) % ring_.size()];
}

// A connection that another rank makes while the group is made.
net::Socket HostLinks::awaitEarly(int from, net::Purpose purpose, const Poll& poll) {
  waits_for_ = from;
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      const auto found = std::ranges::find_if(early_, [&](const Early& e) {
        return e.caller.purpose == purpose && e.caller.from == from;
      });
      if (found != early_.end()) {
        net::Socket socket = std::move(found->socket);
        early_.erase(found);
        return socket;
      }
    }
    checkNext(poll);
    poll();
    AttemptClock::sleep(kMillisecond);
  }
}

// A token goes twice around the control ring.  Each rank passes it on when it has done its part;
// the second round tells all ranks that all have.  The token carries the cost of the slowest wire,
// so all ranks have the same one at the end.  A rank that gives up closes its connections: its
// neighbours see that at once.
void HostLinks::agree(const Poll& poll) {
  if (size_ == 1) return;
  const int next = ringNeighbour(1), previous = ringNeighbour(-1);
  const auto pass = [&](char round) {
    waits_for_ = next;
    const std::string token = round + agreed_cost_.text();
    for (size_t sent = 0; sent < token.size();) {
      const ssize_t n = next_.send(&token[sent], token.size() - sent);
      if (n > 0) {
        sent += static_cast<size_t>(n);
        continue;
      }
      if (errno != EINTR && errno != EAGAIN) gaveUp(next, poll, kEndedConnection);
      poll();
    }
  };
  const auto await = [&](char round) {
    waits_for_ = previous;
    std::string token(1 + agreed_cost_.text().size(), 0);
    for (size_t got = 0;;) {
      const ssize_t n = previous_.receive(&token[got], token.size() - got);
      if (n > 0) {
        if (token[0] != round)
          gaveUp(previous, poll, " sent what no rank does while the group was made");
        got += static_cast<size_t>(n);
        if (got == token.size()) return agreed_cost_.merge(token.substr(1));
        continue;
      }
      if (n == 0 || (errno != EINTR && errno != EAGAIN)) gaveUp(previous, poll, kEndedConnection);
      checkNext(poll);
      poll();
      pollfd wanted{.fd = previous_.get(), .events = POLLIN, .revents = 0};
      ::poll(&wanted, 1, 5);
    }
  };
  const bool first = ring_.front() == rank_, last = ring_.back() == rank_;
  for (const char round : {1, 2}) {
    if (!first) await(round);
    if (round == 1 || !last) pass(round);
    in_last_round_ = true;
    if (first && round == 1) await(round);
  }
}

// Throws if the next rank has given up.  Nothing is taken from the connection, encrypted or not.
void HostLinks::checkNext(const Poll& poll) const {
  char next_byte = 0;
  const ssize_t n = recv(next_.get(), &next_byte, 1, MSG_DONTWAIT | MSG_PEEK);
  if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN))
    gaveUp(ringNeighbour(1), poll, kEndedConnection);
}

// Waits until `poll` throws the reason that the rank left in the store.
void HostLinks::gaveUp(int rank, const Poll& poll, const char* how) const {
  for (const Nanos until = deadlineIn(limits::kReasonDelay); now() < until;) {
    poll();
    AttemptClock::sleep(kStorePoll);
  }
  throw Error(Failure::kSetup, who(rank) + how);
}

// Makes a connection and proves it.
net::Socket HostLinks::dial(int to, net::Purpose purpose, int number, const Poll& poll) const {
  const std::vector<size_t> paths = pathsOf(endpoints_[static_cast<size_t>(to)]);
  const net::DialOptions options{
      // A stopped rank is not lost.  The caller waits until the rank is known to be lost, or its
      // own deadline has passed.
      .timeout = kNever,
      .deaf = limits::kDial,
      .congestion =
          purpose == net::Purpose::kData || purpose == net::Purpose::kSurvey ? congestion_ : "",
      .address = paths[static_cast<size_t>(number) % paths.size()],
      .poll = [](void* context) { (*static_cast<const std::function<void()>*>(context))(); },
      .context = const_cast<std::function<void()>*>(&poll)};
  const net::PeerHello self{.group = nonce_,
                            .from = rank_,
                            .to = to,
                            .purpose = purpose,
                            .connection = number,
                            .encrypted = shared_.encrypted};
  return net::dial(endpoints_[static_cast<size_t>(to)], self, secret_, options, who(to));
}

void HostLinks::take(net::Socket socket, const net::PeerHello& caller) {
  if (caller.from < 0 || caller.from >= size_ || caller.from == rank_) return;
  const std::lock_guard lock(mutex_);
  if (handler_)
    handler_(std::move(socket), caller);
  else
    early_.push_back({std::move(socket), caller});
}

void HostLinks::deliverTo(Handler handler) {
  const std::lock_guard lock(mutex_);
  handler_ = std::move(handler);
  for (Early& early : early_) handler_(std::move(early.socket), early.caller);
  early_.clear();
}

// ---- the order of the data ring
//
// Each host's lowest rank measures the rates from the other hosts and puts them into the store.
// Rank 0 decides for all.

// All ranks compare the same settings, so all throw or none.
void HostLinks::compareRingSettings(const Hosts& hosts) const {
  const std::string setting = settingOf(hosts, 0, kRingSetting);
  const auto inWords = [](const std::string& text) {
    return text.empty() ? std::string("not set") : "'" + text + "'";
  };
  for (int r = 1; r < size_; ++r) {
    const std::string theirs = settingOf(hosts, r, kRingSetting);
    if (theirs == setting) continue;
    std::string text = "RINGREDUCE_RING is ";
    text += inWords(setting);
    text += " at " + who(0) + ", and ";
    text += inWords(theirs);
    text += " at " + who(r) + ": set the same for all ranks";
    throw Error(Failure::kSetup, text);
  }
}

// Once the ranks agree, one without descriptors would leave without a word, as if its process had
// ended.
void HostLinks::reserveDescriptors() {
  for (int i = 0; i < kTransportFds; ++i)
    if (!reserved_.emplace_back(eventfd(0, EFD_CLOEXEC)))
      throwErrno(Failure::kSetup,
                 "no descriptors are left for a group's sockets (raise ulimit -n)");
}

HostRing HostLinks::findRing(const Hosts& hosts, Store& store, const Poll& poll) {
  const RingSetting setting = RingSetting::fromText(ring_setting_);
  HostRing ring = HostRing::of(hosts, setting, options_);
  if (setting.measure) {
    const size_t H = static_cast<size_t>(hosts.count());
    if (hosts.localRankOf(rank_) == 0 && rank_ != 0) {
      TextWriter row;
      for (const double rate : survey(hosts, poll)) row << rate << ' ';
      store.set(rateKey(nonce_, hosts.hostOf(rank_)), row.str());
    }
    if (rank_ == 0) {
      Rates mbit(H, std::vector<double>(H));
      for (size_t to = 0; to < H; ++to) {
        std::vector<double> into = to == 0 ? survey(hosts, poll) : std::vector<double>(H);
        if (to > 0) {
          const std::string key = rateKey(nonce_, static_cast<int>(to));
          waits_for_ = hosts.ranksOn(static_cast<int>(to)).front();
          TextReader row(await(store, key, poll));
          for (double& rate : into) row >> rate;
          store.remove(key);
        }
        for (size_t from = 0; from < H; ++from) mbit[from][to] = into[from];
      }
      store.set(ringKey(nonce_), HostRing::measured(hosts, mbit).toText());
    }
    if (rank_ != 0) waits_for_ = 0;
    ring = HostRing::fromText(hosts, await(store, ringKey(nonce_), poll));
  }
  const bool told = ring.source == HostRing::Source::kMeasured || logsInfo();
  if (rank_ == 0 && told && ring.source != HostRing::Source::kRanks)
    log("group '" + options_.name + "': " + ring.describe(hosts));
  return ring;
}

// The rates at which data comes to this host from each.
std::vector<double> HostLinks::survey(const Hosts& hosts, const Poll& poll) {
  const int H = hosts.count(), own = hosts.hostOf(rank_);
  std::vector<double> rates(static_cast<size_t>(H));
  for (int round = 0; round < net::roundsOf(H); ++round) {
    const int host = net::partnerOf(own, round, H);
    if (host < 0) continue;
    const int other = waits_for_ = hosts.ranksOn(host).front();
    const std::string& name = who(other);
    for (const bool low_sends : {true, false}) {
      const bool is_low = own < host;
      net::Socket connection = is_low ? dial(other, net::Purpose::kSurvey, 0, poll)
                                      : awaitEarly(other, net::Purpose::kSurvey, poll);
      if (is_low == low_sends)
        net::sendBurst(connection, name, poll);
      else
        rates[static_cast<size_t>(host)] = net::receiveBurst(connection, name, poll);
    }
  }
  return rates;
}

// The wire to the next host, or the slowest of the measured ring.
void HostLinks::measureWires() {
  cost_.ranks_on_host = ranks_on_host_;
  if (next_) agreed_cost_.observeRoundTrip(net::roundTripOf(next_));
  if (host_ring_.mbit.size() > 1)
    agreed_cost_.observeBandwidth(slowestLink(host_ring_.mbit, host_ring_.hosts));
}

}  // namespace ringreduce
