// Between the ranks of a communicator of the fake's NCCL: how they find each other, and how letters
// go from one to the other.  Ranks are processes or threads of one machine; each two are connected
// by a Unix socket.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace fake::nccl {

// Results of calls; the numbers are NCCL's.
enum Result : int {
  kSuccess = 0,
  kCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
};

struct Failed {
  Result result;
  std::string why;
};

// Keeps the words for ncclGetLastError, and shows them where NCCL would.
void warn(const std::string& words);
std::string lastWarning();
// Ends the process: a program may not do that, and NCCL would hang, crash or poison data.
[[noreturn]] void punish(const std::string& words);

// A rank's introduction when it joins.
struct Facts {
  int rank, size;
  char host[128];  // or its NCCL_HOSTID
  char gpu[32];
};

// Letters of one kind stay in order, and each kind has a queue of its own.
enum class Kind : uint32_t {
  kCollective,  // a rank's input of a collective call
  kMessage,     // by send and recv
  kTaken,       // a message has been received
  kSplit,       // between hosts, not streams
};
constexpr size_t kKinds = 4;

// A call, as far as other ranks must know it.
struct Heading {
  Kind kind;
  int what, dtype, op, root;
  uint64_t count;
  uint64_t bytes;  // that follow

  bool operator==(const Heading&) const = default;
};

struct Letter {
  Heading heading;
  std::vector<std::byte> data;
};

class Wire {
 public:
  // Waits for all ranks, for ever if one does not come, as NCCL does.  `name` is theirs only.
  // Throws Failed.
  static std::shared_ptr<Wire> join(const std::string& name, const Facts& own);
  ~Wire();

  const std::vector<Facts>& facts() const { return facts_; }
  int rank() const { return own_; }
  int size() const { return static_cast<int>(facts_.size()); }

  // Does not wait for the receiver.  To the own rank too.
  void send(int to, Heading heading, const void* data);
  // Waits.  From a rank that is gone nothing comes: that is noted as an error, and what a stream
  // waits for keeps it waiting until `end`.  None: it was ended, or the rank of a kSplit is gone.
  std::optional<Letter> receive(int from, Kind kind);

  Result error();
  void end();  // from any thread
  bool isEnded();

 private:
  struct Peer {
    int socket = -1;
    std::mutex sending;
    std::array<std::deque<Letter>, kKinds> letters;
    bool gone = false;
  };
  explicit Wire(const Facts& own);
  void read(int from);
  void deliver(int from, Letter letter);

  const int own_;
  std::vector<Facts> facts_;
  std::vector<Peer> peers_;
  std::mutex mutex_;  // of all below, and of letters and gone
  std::condition_variable changed_;
  Result error_ = kSuccess;
  bool ended_ = false;
};

}  // namespace fake::nccl
