// Addresses, the choice of interfaces, ports; and the checksums and hashes of connections.
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "transport/tcp/acceptor.h"
#include "transport/tcp/address.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/sha256.h"

using namespace ringreduce;
using namespace ringreduce::net;

namespace {

std::string hex(const Digest& digest) {
  std::string text;
  for (unsigned char byte : digest)
    for (int digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
  return text;
}

Address host(const std::string& text) {
  const auto address = Address::parseHost(text);
  if (!address) throw std::runtime_error("no address: " + text);
  return *address;
}

Interface on(const std::string& name, const std::string& address, int prefix, bool up = true) {
  return {
      .name = name, .address = host(address), .prefix = prefix, .up = up, .loopback = name == "lo"};
}

// A host with all that hosts have.
std::vector<Interface> rich() {
  return {on("lo", "127.0.0.1", 8),     on("docker0", "172.17.0.1", 16),
          on("eth0", "10.0.0.3", 24),   on("eth1", "10.1.0.3", 24),
          on("ib0", "192.168.7.3", 24), on("eth2", "10.9.0.3", 24, false),
          on("lo", "::1", 128),         on("eth0", "fd00::3", 64),
          on("eth0", "fe80::3%lo", 64), on("eth1", "fd01::3", 64),
          on("wifi", "169.254.3.3", 16)};
}

std::string chosen(const std::vector<Interface>& all, const std::string& wanted,
                   const std::string& towards = "") {
  std::string text;
  const auto way = towards.empty() ? std::nullopt : std::optional(host(towards));
  for (const Address& address : choose(all, wanted, way)) {
    if (!text.empty()) text += ' ';
    text += address.hostText();
  }
  return text;
}

std::string failure(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.kind() == Failure::kSetup);
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(sha256_of_the_standards_examples) {
  CHECK_EQ(hex(Sha256().digest()),
           "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(hex(Sha256().add("abc").digest()),
           "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(hex(Sha256().add("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq").digest()),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(hex(Sha256()
                   .add("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmno"
                        "ijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu")
                   .digest()),
           "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK_EQ(hex(Sha256().add(std::string(1'000'000, 'a')).digest()),
           "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(sha256_in_pieces_is_the_same) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
  for (size_t size = 0; size <= text.size(); ++size) {
    const std::string_view all = std::string_view(text).substr(0, size);
    const Digest whole = Sha256().add(all).digest();
    for (size_t step : {1, 3, 63, 64, 65}) {
      Sha256 pieces;
      for (size_t at = 0; at < size; at += step) pieces.add(all.substr(at, step));
      CHECK(pieces.digest() == whole);
      CHECK(pieces.digest() == whole);  // asking changes nothing
    }
  }
}

TEST(hmac_of_rfc_4231) {
  const auto bytes = [](int byte, size_t n) { return std::string(n, static_cast<char>(byte)); };
  CHECK_EQ(hex(hmacSha256(bytes(0x0b, 20), "Hi There")),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hex(hmacSha256("Jefe", "what do ya want ", "for nothing?")),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hex(hmacSha256(bytes(0xaa, 20), bytes(0xdd, 50))),
           "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string key;
  for (int i = 1; i <= 25; ++i) key += static_cast<char>(i);
  CHECK_EQ(hex(hmacSha256(key, bytes(0xcd, 50))),
           "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK(hex(hmacSha256(bytes(0x0c, 20), "Test With Truncation"))
            .starts_with("a3b6167473100ee06e0c796c2955552b"));
  CHECK_EQ(
      hex(hmacSha256(bytes(0xaa, 131), "Test Using Larger Than Block-Size Key - Hash Key First")),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK_EQ(hex(hmacSha256(bytes(0xaa, 131),
                          "This is a test using a larger than block-size key and a larger than "
                          "block-size data. The key needs to be hashed before being used by the "
                          "HMAC algorithm.")),
           "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(digests_are_told_apart_wherever_they_differ) {
  const Digest digest = Sha256().digest();
  CHECK(sameDigest(digest, digest));
  for (size_t bit = 0; bit < 256; ++bit) {
    Digest other = digest;
    other[bit / 8] = static_cast<unsigned char>(other[bit / 8] ^ 1 << bit % 8);
    CHECK(!sameDigest(digest, other));
  }
}

TEST(crc32c_of_rfc_3720) {
  const auto sum = [](const std::string& bytes) { return crc32c(bytes.data(), bytes.size()); };
  std::string up, down;
  for (int i = 0; i < 32; ++i) up += static_cast<char>(i), down += static_cast<char>(31 - i);
  CHECK_EQ(sum(""), 0u);
  CHECK_EQ(sum("123456789"), 0xe3069283u);
  CHECK_EQ(sum(std::string(32, '\0')), 0x8a9136aau);
  CHECK_EQ(sum(std::string(32, '\xff')), 0x62a8ab43u);
  CHECK_EQ(sum(up), 0x46dd794eu);
  CHECK_EQ(sum(down), 0x113fdb5cu);
}

TEST(addresses_are_read_and_written) {
  for (const char* text : {"10.0.0.3:4711", "[fd00::3]:4711", "[fe80::1%lo]:4711", "0.0.0.0:0",
                           "[::1]:65535", "255.255.255.255:1"})
    CHECK_EQ(Address::parse(text).value().text(), text);
  CHECK_EQ(Address::parse("[::ffff:10.0.0.3]:7").value().text(), "10.0.0.3:7");
  for (const char* text : {"",
                           ":",
                           "10.0.0.3",
                           "10.0.0.3:",
                           "10.0.0.3:65536",
                           "10.0.0.3:-1",
                           "10.0.0.3:+1",
                           "10.0.0.3: 1",
                           "10.0.0.3:1x",
                           "10.0.0:1",
                           "fd00::3:4711",
                           "[fd00::3]",
                           "[fd00::3]4711",
                           "[fd00::3:4711",
                           "fd00::3]:4711",
                           "[]:1",
                           "[10.0.0.3]:1",
                           "[fe80::1%none-such]:1",
                           "[fe80::1%]:1",
                           "host:1",
                           "10.0.0.3:99999999999999999999",
                           "[::1]:1:1"})
    if (const auto address = Address::parse(text))
      throw std::runtime_error(std::string(text) + " was read as " + address->text());
  CHECK(!Address::parse(std::string("10.0.0.3\0x:1", 12)));
  CHECK_EQ(Address().text(), "no address:0");
}

TEST(addresses_are_compared) {
  CHECK(host("127.0.0.1").isLoopback() && host("127.9.9.9").isLoopback());
  CHECK(host("::1").isLoopback() && !host("10.0.0.3").isLoopback() && !host("::2").isLoopback());
  CHECK(host("169.254.1.1").isLinkLocal() && host("fe80::1").isLinkLocal());
  CHECK(!host("169.253.1.1").isLinkLocal() && !host("fd00::1").isLinkLocal());
  CHECK(host("10.0.0.3").withPort(7).sameHost(host("10.0.0.3")));
  CHECK(!host("10.0.0.3").sameHost(host("10.0.0.2")));
  CHECK(!host("fe80::1%lo").sameHost(host("fe80::1")));
  CHECK(!host("0.0.0.0").sameHost(host("::")));
  CHECK(host("10.0.0.3").sameNetwork(host("10.255.0.3"), 8));
  CHECK(!host("10.0.0.3").sameNetwork(host("11.0.0.3"), 8));
  CHECK(host("10.0.0.3").sameNetwork(host("10.0.0.2"), 31));
  CHECK(!host("10.0.0.3").sameNetwork(host("10.0.0.4"), 30));
  CHECK(host("1.2.3.4").sameNetwork(host("200.2.3.4"), 0));
  CHECK(!host("1.2.3.4").sameNetwork(host("::1"), 0));
  CHECK(host("fd00::3").sameNetwork(host("fdff::3"), 8));
  CHECK(!host("fd00::3").sameNetwork(host("fd00::2"), 128));
}

TEST(this_hosts_interfaces_are_seen) {
  bool loopback = false;
  for (const Interface& one : interfaces()) {
    CHECK(one.address.port() == 0 && one.prefix >= 0 && one.prefix <= one.address.bits());
    if (one.address.hostText() == "127.0.0.1") loopback = one.loopback && one.up && one.prefix == 8;
  }
  CHECK(loopback);
  CHECK_EQ(addressTowards("127.0.0.1").value().text(), "127.0.0.1:0");
  CHECK_EQ(addressTowards("[::1]").value().text(), "[::1]:0");
  CHECK(addressTowards("localhost").value().isLoopback());
  CHECK(!addressTowards("") && !addressTowards("no such host"));
}

TEST(without_a_list_it_is_the_interface_towards_the_store) {
  CHECK_EQ(chosen(rich(), "", "10.1.0.3"), "10.1.0.3 fd01::3");
  CHECK_EQ(chosen(rich(), "", "fd01::3"), "fd01::3 10.1.0.3");
  CHECK_EQ(chosen(rich(), "", "192.168.7.3"), "192.168.7.3");
  // Not known, or loopback: all that other hosts may reach.
  const std::string all = "10.0.0.3 10.1.0.3 192.168.7.3 fd00::3 fd01::3";
  CHECK_EQ(chosen(rich(), ""), all);
  CHECK_EQ(chosen(rich(), "", "127.0.0.1"), all);
  CHECK_EQ(chosen(rich(), "", "10.77.0.1"), all);
  // What only this host has, link-local addresses, loopback: only if there is nothing better.
  CHECK_EQ(chosen({on("lo", "127.0.0.1", 8), on("docker0", "172.17.0.1", 16)}, ""), "172.17.0.1");
  CHECK_EQ(chosen({on("lo", "127.0.0.1", 8), on("a", "169.254.0.9", 16)}, ""), "169.254.0.9");
  CHECK_EQ(chosen({on("lo", "127.0.0.1", 8), on("lo", "::1", 128)}, ""), "127.0.0.1 ::1");
  CHECK_EQ(chosen({on("lo", "::1", 128), on("a", "10.0.0.1", 8, false)}, ""), "::1");
}

TEST(a_list_says_which_interfaces) {
  CHECK_EQ(chosen(rich(), "eth0", "10.1.0.3"), "10.0.0.3 fd00::3");
  CHECK_EQ(chosen(rich(), "eth*", "10.1.0.3"), "10.1.0.3 fd01::3 10.0.0.3 fd00::3");
  CHECK_EQ(chosen(rich(), "eth?", "fd01::3"), "fd01::3 10.1.0.3 10.0.0.3 fd00::3");
  CHECK_EQ(chosen(rich(), " ib0 , eth0", "10.0.0.3"), "192.168.7.3 10.0.0.3 fd00::3");
  CHECK_EQ(chosen(rich(), "eth0,,none0"), "10.0.0.3 fd00::3");
  CHECK_EQ(chosen(rich(), "docker0"), "172.17.0.1");
  CHECK_EQ(chosen(rich(), "10.0.0.0/8"), "10.0.0.3 10.1.0.3");
  CHECK_EQ(chosen(rich(), "10.1.0.0/16,fd00::/16"), "10.1.0.3 fd00::3");
  CHECK_EQ(chosen(rich(), "10.1.0.3"), "10.1.0.3");
  CHECK_EQ(chosen(rich(), "fd00::3"), "fd00::3");
  CHECK_EQ(chosen(rich(), "0.0.0.0/0,^docker0,^lo,^wifi"), "10.0.0.3 10.1.0.3 192.168.7.3");
  CHECK_EQ(chosen(rich(), "^eth0"), "10.1.0.3 192.168.7.3 fd01::3");
  CHECK_EQ(chosen(rich(), "^eth0", "10.0.0.3"), "10.1.0.3 192.168.7.3 fd01::3");
  CHECK_EQ(chosen(rich(), "^fd00::/8,^ib*", "10.0.0.3"), "10.0.0.3");
  CHECK_EQ(chosen(rich(), "eth*,^10.0.0.0/16,^fd00::/8"), "10.1.0.3");
  CHECK_EQ(chosen(rich(), "lo"), "127.0.0.1 ::1");
  CHECK_EQ(chosen(rich(), "127.0.0.0/8"), "127.0.0.1");
  CHECK_EQ(chosen(rich(), "lo,eth0"), "10.0.0.3 fd00::3");
  CHECK_EQ(chosen(rich(), "wifi"), "169.254.3.3");
  CHECK_EQ(chosen(rich(), "fe80::/10"), "fe80::3%lo");
  CHECK_EQ(chosen(rich(), "169.254.0.0/16,eth1"), "169.254.3.3 10.1.0.3 fd01::3");
}

TEST(a_list_that_leaves_nothing_names_what_there_is) {
  for (const char* wanted : {"none0", "eth2", "^*", "11.0.0.0/8", "eth0,^eth*"}) {
    const std::string text = failure([&] { chosen(rich(), wanted); });
    CHECK(contains(text, wanted) && contains(text, "eth0 (10.0.0.3/24)"));
    CHECK(contains(text, "eth2 (10.9.0.3/24, down)") && contains(text, "RINGREDUCE_IF"));
  }
  CHECK(contains(failure([] { chosen({on("lo", "::1", 128)}, "^lo"); }), "lo (::1/128)"));
  CHECK(contains(failure([] { chosen({}, ""); }), "no interface with an address"));
  // Another was asked for, so it is not loopback either.
  CHECK(contains(failure([] { chosen({on("lo", "::1", 128), on("a", "10.0.0.1", 8)}, "^a"); }),
                 "^a"));
  CHECK_EQ(chosen({on("lo", "::1", 128)}, "^docker0"), "::1");
  for (const char* wrong : {"10.0.0.0/33", "10.0.0.0/", "10.0.0.0/x", "eth0/8", "^", "fd00::/129",
                            "^^eth0", "eth 0", "fd00:::1", "10.0.0.0/-1", "10.0.0.0/8/8"})
    CHECK(contains(failure([&] { chosen(rich(), std::string("eth0,") + wrong); }),
                   std::string(wrong) + "' is neither"));
}

TEST(many_addresses_are_bounded) {
  std::vector<Interface> many;
  for (int i = 0; i < 50; ++i) many.push_back(on("e", "10.0.0." + std::to_string(i), 24));
  CHECK_EQ(choose(many, "", std::nullopt).size(), kMostAddresses);
  CHECK_EQ(choose(many, "", host("10.0.0.40"))[0].hostText(), "10.0.0.40");
}

TEST(endpoints_are_read_and_written) {
  const std::string text = "10.0.0.3:4711 [fd00::3]:4711";
  CHECK_EQ(Endpoint::fromText(text).text(), text);
  CHECK_EQ(Endpoint::fromText(" " + text + "  10.0.0.3:4711\n").text(), text);
  CHECK_EQ(Endpoint::fromText("[fe80::1%none-such]:1 10.0.0.3:1").text(), "10.0.0.3:1");
  for (const char* wrong : {"", "  ", "x", "10.0.0.3", "10.0.0.3:0", "10.0.0.3:1 x",
                            "[fe80::1%none-such]:1", "[fe80::1%none-such]:x", "%]:1"})
    CHECK(!failure([&] { Endpoint::fromText(wrong); }).empty());
}

TEST(ranges_of_ports) {
  const auto range = [](const char* text) {
    const Ports ports = Ports::fromText(text);
    return std::to_string(ports.first) + "-" + std::to_string(ports.last);
  };
  CHECK_EQ(range("47000-47100"), "47000-47100");
  CHECK_EQ(range("47000"), "47000-47000");
  CHECK_EQ(range("1-65535"), "1-65535");
  for (const char* wrong : {"", "-", "1-", "-1", "0", "0-5", "5-4", "65536", "1-65536", "a", "1-b",
                            "1-2-3", " 1", "1 - 2", "999999999999"})
    CHECK(contains(failure([&] { Ports::fromText(wrong); }),
                   "RINGREDUCE_PORTS=" + std::string(wrong) + " is no range"));
}

TEST(one_port_at_all_addresses_and_no_other) {
  const Listener listener = listenOn({host("127.0.0.1"), host("::1"), host("127.0.0.2")}, {});
  CHECK_EQ(listener.sockets.size(), size_t{3});
  CHECK(listener.port != 0);
  for (const Address& address : listener.addresses) CHECK_EQ(address.port(), listener.port);
  const auto answers = [&](const Address& address) {
    const Fd fd(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    return connect(fd.get(), address.get(), address.length()) == 0;
  };
  for (const Address& address : listener.addresses) CHECK(answers(address));
  CHECK(!answers(host("127.0.0.3").withPort(listener.port)));
}

TEST(an_address_that_is_not_here_is_left_out) {
  const Listener listener = listenOn({host("203.0.113.7"), host("127.0.0.1")}, {});
  CHECK_EQ(listener.addresses.size(), size_t{1});
  CHECK_EQ(listener.addresses[0].hostText(), "127.0.0.1");
  CHECK(contains(failure([] { listenOn({host("203.0.113.7")}, {}); }), "203.0.113.7"));
}

TEST(a_range_is_used_up_and_used_again) {
  // Three ports in a row that are free now; others may take them meanwhile, hence the tries.
  for (int tries = 0; tries < 50; ++tries) {
    const uint16_t first = listenOn({host("127.0.0.1"), host("::1")}, {}).port;
    if (first > 65'000) continue;
    const Ports ports{first, static_cast<uint16_t>(first + 2)};
    std::vector<Listener> taken;
    std::string error;
    for (int i = 0; i < 3 && error.empty(); ++i)
      error = failure([&] { taken.push_back(listenOn({host("127.0.0.1"), host("::1")}, ports)); });
    if (!error.empty()) continue;
    for (int i = 0; i < 3; ++i) CHECK_EQ(taken[static_cast<size_t>(i)].port, first + i);
    error = failure([&] { listenOn({host("127.0.0.1"), host("::1")}, ports); });
    CHECK(contains(error, "all ports from " + std::to_string(first)) &&
          contains(error, "RINGREDUCE_PORTS"));
    // One that is taken at one address is passed over at all.
    taken[1].sockets.resize(1);
    CHECK(contains(failure([&] { listenOn({host("::1"), host("127.0.0.1")}, ports); }), "taken"));
    taken.erase(taken.begin() + 1);
    CHECK_EQ(listenOn({host("::1"), host("127.0.0.1")}, ports).port, first + 1);
    return;
  }
  throw std::runtime_error("found no three free ports in a row");
}

TEST(many_processes_find_ports_of_a_range_at_once) {
  for (int tries = 0; tries < 20; ++tries) {
    const uint16_t first = listenOn({host("127.0.0.1")}, {}).port;
    if (first > 65'000) continue;
    std::vector<Listener> taken(16);
    std::vector<std::string> errors(16);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 16; ++i)
      threads.emplace_back([&, i] {
        errors[i] = failure([&] {
          taken[i] = listenOn({host("127.0.0.1")}, {first, static_cast<uint16_t>(first + 200)});
        });
      });
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < 16; ++i) {
      CHECK_EQ(errors[i], "");
      for (size_t j = 0; j < i; ++j) CHECK(taken[i].port != taken[j].port);
    }
    return;
  }
}
