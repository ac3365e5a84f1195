// Offers, and the mappings of other ranks' blocks.
#include "transport/shm/shared_tensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace ringreduce {
namespace {

// Another rank's block; throws Error if it cannot be opened.
std::shared_ptr<Segment> open(const TensorOffer& offer) {
  const std::string path = "/proc/" + std::to_string(offer.pid) + "/fd/" + std::to_string(offer.fd);
  struct stat status{};
  // Not yet opened, it may be any file of any process.
  const bool is_it = stat(path.c_str(), &status) == 0 && status.st_dev == offer.device &&
                     status.st_ino == offer.inode;
  Fd fd(is_it ? ::open(path.c_str(), O_RDWR | O_CLOEXEC) : -1);
  if (!fd || fstat(fd.get(), &status) != 0 || status.st_dev != offer.device ||
      status.st_ino != offer.inode)
    throw Error(Failure::kSetup, "process " + std::to_string(offer.pid) +
                                     " of the same host cannot be reached by /proc");
  auto segment = Segment::attach(std::move(fd), offer.bytes);
  segment->closeFd();
  return segment;
}

}  // namespace

SharedTensors::SharedTensors(int rank, std::vector<RankPage*> pages, Exchange& exchange,
                             Waiter& waiter, WaitGuard& guard)
    : rank_(rank),
      pages_(std::move(pages)),
      exchange_(exchange),
      waiter_(waiter),
      guard_(guard),
      offers_(pages_.size()),
      places_(pages_.size()) {}

void SharedTensors::offer(uint64_t sequence, const void* data, size_t bytes, bool is_output) {
  sequence_ = sequence;
  own_ = data ? SharedBlock::holding(data, bytes) : nullptr;
  own_data_ = static_cast<const std::byte*>(data);
  own_bytes_ = bytes;
  if (!own_ && !has_offered_) return;
  has_offered_ = true;
  TensorOffer& offer = pages_[static_cast<size_t>(rank_)]->offers[sequence % kAnnouncements];
  offer.block = own_ ? own_->number() : 0;
  if (!own_) return;
  offer.offset = static_cast<size_t>(static_cast<const std::byte*>(data) - own_->data());
  offer.bytes = own_->size();
  offer.device = own_->device();
  offer.inode = own_->inode();
  offer.pid = getpid();
  offer.fd = own_->fd();
  offer.is_output = is_output;
}

const std::vector<std::byte*>* SharedTensors::gather() {
  if (!own_) return nullptr;
  const int size = static_cast<int>(pages_.size());
  // The announcements of this operation are all that these ranks wait for.
  for (int r = 0; r < size; ++r)
    if (r != rank_) wakeIfWaiting(*pages_[static_cast<size_t>(r)], rank_);
  for (int r = 0; r < size; ++r) {
    RankPage& page = *pages_[static_cast<size_t>(r)];
    if (r != rank_) {
      waiter_.until(r, [&] { return page.announced.observe() > sequence_; });
      guard_.verify(r);
    }
    offers_[static_cast<size_t>(r)] = page.offers[sequence_ % kAnnouncements];
    const TensorOffer& offer = offers_[static_cast<size_t>(r)];
    if (offer.block == 0 || offer.is_output != offers_[0].is_output) return nullptr;
  }
  const Blocks& blocks = blocksOf(offers_);
  if (!blocks.usable) return nullptr;
  for (size_t r = 0; r < places_.size(); ++r) {
    std::byte* const memory =
        static_cast<int>(r) == rank_ ? own_->data() : blocks.segments[r]->data();
    places_[r] = memory + offers_[r].offset;
  }
  return &places_;
}

const SharedTensors::Blocks& SharedTensors::blocksOf(const std::vector<TensorOffer>& offers) {
  std::vector<uint64_t> numbers;
  for (const TensorOffer& offer : offers) numbers.push_back(offer.block);
  const auto [found, is_new] = known_.try_emplace(std::move(numbers));
  Blocks& blocks = found->second;
  blocks.used = sequence_;
  if (!is_new) return blocks;
  if (known_.size() > kMostSets)
    known_.erase(
        std::ranges::min_element(known_, {}, [](const auto& known) { return known.second.used; }));
  blocks.segments = map(offers);
  blocks.usable = allHave(!blocks.segments.empty());
  if (!blocks.usable) blocks.segments.clear();
  return blocks;
}

// By rank, without this one's; empty if one cannot be mapped.
std::vector<std::shared_ptr<Segment>> SharedTensors::map(
    const std::vector<TensorOffer>& offers) const {
  std::vector<std::shared_ptr<Segment>> segments(offers.size());
  for (size_t r = 0; r < offers.size(); ++r) try {
      if (static_cast<int>(r) != rank_) segments[r] = open(offers[r]);
    } catch (const Error& error) {
      if (known_.size() == 1)
        log(std::string("shared tensors go through the slots: ") + error.what());
      return {};
    }
  return segments;
}

// Whether all ranks say so.
bool SharedTensors::allHave(bool mine) {
  const uint64_t step = exchange_.begin(1);
  *exchange_.acquire(step) = static_cast<std::byte>(mine);
  exchange_.post(step);
  bool all = mine;
  for (int r = 0; r < exchange_.size(); ++r)
    if (r != rank_) all = *exchange_.peek(r, step) == std::byte{1} && all;
  exchange_.release(step);
  return all;
}

void SharedTensors::detach() {
  if (!own_) return;
  try {
    own_->detach(own_data_, own_bytes_);
  } catch (const Error& error) {  // that of the operation matters more
    log(std::string("after a failed operation peers may write to a tensor: ") + error.what());
  }
  own_ = nullptr;
}

}  // namespace ringreduce
