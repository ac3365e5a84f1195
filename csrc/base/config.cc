// The table of environment variables, each with the function that reads it.
#include "base/config.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <string_view>

#include "base/text.h"

namespace ringreduce {
namespace {

// "" where it is not set
std::string textOf(const char* name) {
  const char* text = std::getenv(name);
  return text ? text : "";
}

// A variable that is set.
struct Given {
  const char* name;
  std::string text;
  std::string error = {};  // of the reader below, if it failed

  Error failed(Failure kind, const std::string& what) {
    error = name + what;
    return {kind, error};
  }
  Error refused(Failure kind, const std::string& why) {
    return failed(kind, "=" + text + " " + why);
  }
  Error isNot(const std::string& wanted) {
    return refused(Failure::kSetup, "is not " + wanted + "; correct or unset it");
  }

  Error wasRemoved(const std::string& advice) {
    return failed(Failure::kSetup, " was removed: " + advice + ", and unset it");
  }

  // A whole number; sizes may end in K, M or G (of 1024).
  EnvValue<int64_t> integer(int64_t low, int64_t high) {
    const std::string wanted =
        "a whole number from " + std::to_string(low) + " to " + std::to_string(high);
    std::string_view suffix = text;
    const auto read = takeNumber(suffix);
    if (!read) return isNot(wanted);
    double number = *read;
    if (suffix == "K" || suffix == "k")
      number *= 1 << 10;
    else if (suffix == "M" || suffix == "m")
      number *= 1 << 20;
    else if (suffix == "G" || suffix == "g")
      number *= 1 << 30;
    else if (!suffix.empty())
      return isNot(wanted);
    if (!(number >= static_cast<double>(low) && number <= static_cast<double>(high)) ||
        number != std::floor(number))
      return isNot(wanted);
    return static_cast<int64_t>(number);
  }

  EnvValue<double> number(const char* unit, double low, double high) {
    std::string_view rest = text;
    const auto number = takeNumber(rest);
    if (!number || !rest.empty() || !(*number >= low && *number <= high))
      return isNot(std::string("a number of ") + unit + " from " + shortText(low, 10) + " to " +
                   shortText(high, 10));
    return *number;
  }

  EnvValue<std::string> word(std::initializer_list<std::string_view> words) {
    if (std::ranges::find(words, text) != words.end()) return text;
    return refused(Failure::kSetup,
                   "is none of " + joined(words, ", ", std::identity()) + "; correct or unset it");
  }
  EnvValue<std::string> gpuWord(std::vector<std::string_view> words) {
    if (std::ranges::find(words, text) != words.end()) return text;
    const std::string last(words.back());
    words.pop_back();
    return refused(Failure::kArgument,
                   "is none of " + joined(words, ", ", std::identity()) + " and " + last);
  }
};

constexpr const char* kOwn = "each rank's";
constexpr const char* kRank0 = "rank 0's";
constexpr const char* kLowest = "rank 0's; of a group on several hosts each host's lowest rank's";
constexpr const char* kSame = "the same on all ranks";
constexpr const char* kSlowest = "the slowest rank's";

struct Row {
  const char *name, *fallback, *values, *meaning, *holds;
  void (*read)(Config&, Given&);
  bool by_python = false;  // and not by the core
};

using C = Config;
const Row kRows[] = {
    {"RINGREDUCE_ALGORITHM", "auto",
     "auto, direct, twoshot, ring; between hosts also bruck, hierarchical",
     "the algorithm of all-reduce", kRank0,
     [](C& c, Given& g) {
       c.algorithm = g.word({"auto", "direct", "twoshot", "ring", "bruck", "hierarchical"});
     }},
    {"RINGREDUCE_ORDER", "ring", "ring, rank",
     "rank: sums add the ranks' values in the order 0, 1, 2, ...", kRank0,
     [](C& c, Given& g) { c.order = g.word({"ring", "rank"}); }},
    {"RINGREDUCE_SLOT_BYTES", "128K; 256K where ranks outnumber cores",
     "4K to 64M, a multiple of 128", "the size of a slot of shared memory", kLowest,
     [](C& c, Given& g) { c.slot_bytes = g.integer(C::kLeastSlotBytes, C::kMostSlotBytes); }},
    {"RINGREDUCE_SLOTS", "4", "3 to 32", "slots a rank has, for each of its two wires", kLowest,
     [](C& c, Given& g) { c.slots = g.integer(C::kLeastSlots, C::kMostSlots); }},
    {"RINGREDUCE_ON_LOSS", "error", "error, continue",
     "continue: operations go on without ranks that are lost", kRank0,
     [](C& c, Given& g) { c.on_loss = g.word({"error", "continue"}); }},
    {"RINGREDUCE_MIN_RANKS", "1", "1 to 1e6",
     "with RINGREDUCE_ON_LOSS=continue: if fewer ranks are left, the group fails", kRank0,
     [](C& c, Given& g) { c.min_ranks = g.integer(1, 1'000'000); }},
    {"RINGREDUCE_STALL_SECONDS", "10", "0.01 to 1e9 seconds", "waits longer than this are logged",
     kOwn, [](C& c, Given& g) { c.stall_seconds = g.number("seconds", 0.01, 1e9); }},
    {"RINGREDUCE_LOG", "errors and stalls only", "info",
     "info: also logs the interface, the ring order, what is assumed of lines and the choice of "
     "compression",
     kOwn,
     [](C& c, Given& g) {
       if (g.text == "info")
         c.log = g.text;
       else
         c.log = g.refused(Failure::kSetup, "can be 'info' only; correct or unset it");
     }},
    {"RINGREDUCE_WIRE", "auto", "auto, tcp", "tcp: ranks of one host use sockets too", kRank0,
     [](C& c, Given& g) { c.wire = g.word({"auto", "tcp"}); }},
    {"RINGREDUCE_IF", "the interface towards the store's host",
     "names, eth*, 10.0.0.0/8, fd00::/8, ^docker0; best first, with commas",
     "the interfaces between hosts", kOwn, [](C& c, Given& g) { c.interfaces = g.text; }},
    {"RINGREDUCE_PORTS", "any", "a port or a range such as 47000-47100",
     "the ports to listen on, one a process", kOwn, [](C& c, Given& g) { c.ports = g.text; }},
    {"RINGREDUCE_CONGESTION", "the system's, but not BBR on short paths until packets are lost",
     "bbr, cubic, ...", "congestion control of the data that a rank sends to other hosts", kOwn,
     [](C& c, Given& g) { c.congestion = g.text; }},
    {"RINGREDUCE_LANES", "as many as help", "1 to 64; 0: as many as help",
     "connections that a rank sends data on, to each rank of another host", kOwn,
     [](C& c, Given& g) { c.lanes = g.integer(0, C::kMostLanes); }},
    {"RINGREDUCE_RING", "the ranks' order", "measure, or hosts or ranks in order: 0,2,1",
     "the order of the ring between hosts", kSame, [](C& c, Given& g) { c.ring = g.text; }},
    {"RINGREDUCE_TLS", "0", "0, 1",
     "1: connections between ranks are encrypted; needs a build with OpenSSL 3", kSame,
     [](C& c, Given& g) { c.tls = g.integer(0, 1); }},
    {"RINGREDUCE_LOST_SECONDS", "3", "0.5 to 3600 seconds",
     "a host that is silent for this long is lost", kOwn,
     [](C& c, Given& g) { c.lost_seconds = g.number("seconds", 0.5, 3600); }},
    {"RINGREDUCE_ROUND_TRIP_MS", "as the system sees it", "0.001 to 60000 ms",
     "the round trip between hosts, for choosing the algorithm", kSlowest,
     [](C& c, Given& g) { c.round_trip_ms = g.number("milliseconds", 0.001, 60'000); }},
    {"RINGREDUCE_BANDWIDTH_MBIT", "8000, until calls have measured it", "0.001 to 1e7 Mbit/s",
     "the bandwidth of a host, for choosing the algorithm", kSlowest,
     [](C& c, Given& g) { c.bandwidth_mbit = g.number("Mbit/s", 0.001, 1e7); }},
    {"RINGREDUCE_HOSTID", "of the kernel and the network namespace",
     "any text of at most 255 bytes",
     "ranks of one machine with different ones pose as different hosts; never the same on two "
     "machines",
     kOwn,
     [](C& c, Given& g) {
       if (g.text.size() <= C::kMostHostId)
         c.host_id = g.text;
       else
         c.host_id = g.failed(Failure::kSetup, " has " + std::to_string(g.text.size()) +
                                                   " bytes, and may have " +
                                                   std::to_string(C::kMostHostId) + "; shorten it");
     }},
    {"RINGREDUCE_CUDA_ALGORITHM", "auto", "auto, direct, oneshot, twoshot, ring, ll, located, nvls",
     "the algorithm of all-reduce on GPUs", "each host's lowest rank's",
     [](C& c, Given& g) {
       c.cuda_algorithm =
           g.gpuWord({"auto", "direct", "oneshot", "twoshot", "ring", "ll", "located", "nvls"});
     }},
    {"RINGREDUCE_CUDA_WAY", "the best there is", "pointer, descriptor, ipc, host",
     "how GPUs reach each other's memory", kSame,
     [](C& c, Given& g) { c.cuda_way = g.gpuWord({"pointer", "descriptor", "ipc", "host"}); }},
    {"RINGREDUCE_CUDA_MAP", "own", "own, vmm",
     "which GPU tensors other ranks use in place: in ringreduce's own memory, or (vmm) also in "
     "torch's expandable segments",
     kOwn, [](C& c, Given& g) { c.cuda_map = g.gpuWord({"own", "vmm"}); }},
    {"RINGREDUCE_CUDA_OTHER", "auto", "auto, nccl, host",
     "the backend of calls on CUDA tensors that have no kernels here", kRank0,
     [](C&, Given& g) { g.gpuWord({"auto", "nccl", "host"}); }, true},
    {"RINGREDUCE_NCCL", "torch's, else the system's", "a path of a libnccl.so.2",
     "the NCCL library between hosts with GPUs", kOwn, [](C& c, Given& g) { c.nccl = g.text; }},
    {"RINGREDUCE_ISA", "the best there is", "v2, v3, v4",
     "the instruction set of the kernels, chosen once a process", kOwn,
     [](C& c, Given& g) { c.instruction_set = g.text; }},
    {"RINGREDUCE_DEFAULT", "none", "cpu, cuda, cpu,cuda",
     "on machines without GPUs (cpu) or with (cuda), groups that name no backend are ringreduce's",
     kSame, [](C&, Given& g) { g.word({"cpu", "cuda", "cpu,cuda", "cuda,cpu"}); }, true},
    {"RINGREDUCE_REPLACE", "none", "gloo",
     "gloo: groups of the backend gloo are made by ringreduce", kSame,
     [](C&, Given& g) { g.word({"gloo"}); }, true},
    {"RINGREDUCE_DUMP", "none", "a folder, the same for all ranks",
     "the folder of the records that each rank writes when a group fails", kOwn, [](C&, Given&) {},
     true},
    {"RINGREDUCE_DUMP_SIGNAL", "none", "USR1, USR2",
     "the signal at which a rank writes its records, unless it has a handler", kOwn,
     [](C&, Given& g) { g.word({"USR1", "USR2"}); }, true},
    {"RINGREDUCE_TIMELINE", "none", "a directory, which is made if there is none",
     "where each rank writes when it and the others came to each operation", kOwn,
     [](C&, Given&) {}, true},
    {"RINGREDUCE_METRICS", "none", "a folder, which is made if there is none",
     "where each rank writes its counts each second, for ringreduce.top and Prometheus", kOwn,
     [](C&, Given&) {}, true},
    {"RINGREDUCE_CHECKSUM", "removed", "none", "removed: use RINGREDUCE_TLS=1", kRank0,
     [](C& c, Given& g) {
       c.removed = g.wasRemoved("set RINGREDUCE_TLS=1 to protect data between hosts");
     }},
};

// The texts and errors of all rows.
std::vector<Given> readInto(Config& config) {
  std::vector<Given> all;
  for (const Row& row : kRows) {
    Given& given = all.emplace_back(Given{row.name, textOf(row.name)});
    if (!given.text.empty()) row.read(config, given);
  }
  return all;
}

}  // namespace

Config Config::read() {
  Config config;
  readInto(config);
  config.master_addr = textOf("MASTER_ADDR");
  config.nccl_shares_gpus = textOf("NCCL_MULTI_RANK_GPU_ENABLE") == "1";
  return config;
}

bool logsInfo() {
  return Config::read().log.orDefault() == "info";
}

std::vector<Variable> variables() {
  Config config;
  std::vector<Variable> all;
  const std::vector<Given> given = readInto(config);
  for (size_t i = 0; i < given.size(); ++i) {
    const Row& row = kRows[i];
    all.push_back({row.name, row.fallback, row.values, row.meaning, row.holds,
                   row.by_python ? "Python" : "core", given[i].text, given[i].error});
  }
  return all;
}

}  // namespace ringreduce
