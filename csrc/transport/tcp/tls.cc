// TLS by OpenSSL.
//
// OpenSSL writes to a buffer, so that it never has to repeat a partial write.  Several records make
// one system call, and encrypted bytes count as sent once the kernel has taken all of them. OpenSSL
// reads straight from the socket.
#include "transport/tcp/tls.h"

#include "base/error.h"

#ifdef RINGREDUCE_OPENSSL

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

namespace ringreduce::net {
namespace {

constexpr size_t kRecord = 16 << 10;   // bytes, at most
constexpr size_t kAtOnce = 128 << 10;  // bytes that are encrypted before a send
constexpr std::string_view kIdentity = "ringreduce";

const unsigned char* identity() {
  return reinterpret_cast<const unsigned char*>(kIdentity.data());
}

[[noreturn]] void cannotBegin(const char* what) {
  throw Error(Failure::kSetup, std::string("OpenSSL cannot be used for RINGREDUCE_TLS=1: ") + what);
}

// The reason of the last error of OpenSSL.
std::string textOfLibrary() {
  const unsigned long code = ERR_peek_last_error();
  const char* reason = code ? ERR_reason_error_string(code) : nullptr;
  return reason ? reason : "no reason given";
}

class OpenSsl final : public Tls {
 public:
  OpenSsl(Side side, int socket, const Digest& key, size_t bytes_of_a_key)
      : ssl_(SSL_new(context())), socket_(socket), key_(key), bytes_of_a_key_(bytes_of_a_key) {
    BIO* bio = ssl_ ? BIO_new(method()) : nullptr;
    if (!bio) {
      SSL_free(ssl_);
      cannotBegin("it has no memory for a connection");
    }
    BIO_set_data(bio, this);
    BIO_set_init(bio, 1);
    SSL_set_bio(ssl_, bio, bio);
    SSL_set_app_data(ssl_, this);
    if (side == Side::kDialler)
      SSL_set_connect_state(ssl_);
    else
      SSL_set_accept_state(ssl_);
  }
  ~OpenSsl() override {
    SSL_free(ssl_);  // sends nothing
    OPENSSL_cleanse(key_.data(), key_.size());
  }

  State shakeHands() override;
  bool wantsToWrite() const override { return !out_.empty(); }
  const std::string& why() const override { return why_; }
  ssize_t send(const iovec* pieces, size_t count) override;
  ssize_t receive(const iovec* pieces, size_t count) override;
  bool holdsBytes() const override { return SSL_has_pending(ssl_) == 1; }
  uint64_t bytesRead() const override { return bytes_read_; }

 private:
  // A position in the pieces to send.
  struct Cursor {
    const iovec* piece;
    const iovec* end;
    size_t at = 0;
    size_t left() const { return piece->iov_len - at; }
    const std::byte* data() const { return static_cast<const std::byte*>(piece->iov_base) + at; }
    bool atEnd() {
      while (piece != end && left() == 0) advance();
      return piece == end;
    }
    void advance() {
      ++piece;
      at = 0;
    }
    void skip(size_t bytes) {
      while (bytes > 0 && !atEnd()) {
        const size_t n = std::min(bytes, left());
        at += n;
        bytes -= n;
      }
    }
  };

  static SSL_CTX* context();
  static SSL_CTX* makeContext();
  static BIO_METHOD* method();
  static OpenSsl& of(BIO* bio) { return *static_cast<OpenSsl*>(BIO_get_data(bio)); }
  static int readSocket(BIO* bio, char* data, int bytes);
  static int writeBuffer(BIO* bio, const char* data, int bytes);
  static long control(BIO* bio, int what, long number, void* data);
  SSL_SESSION* session() const;
  static int useSession(SSL* ssl, const EVP_MD* digest, const unsigned char** name,
                        size_t* name_bytes, SSL_SESSION** session);
  static int findSession(SSL* ssl, const unsigned char* name, size_t name_bytes,
                         SSL_SESSION** session);

  State refuse(const std::string& why, State how = State::kRefused);
  bool flush();
  bool encrypt(Cursor& from, size_t& bytes);

  SSL* const ssl_;
  const int socket_;
  Digest key_;
  const size_t bytes_of_a_key_;
  State state_ = State::kGoesOn;
  std::string why_;
  std::vector<char> out_;  // encrypted; not sent from flushed_ on
  size_t flushed_ = 0;
  size_t owed_ = 0;  // plain bytes in out_ that send() has not reported as sent
  size_t of_this_key_ = 0;
  uint64_t bytes_read_ = 0;
  bool ended_ = false;  // the socket is at its end
  int error_ = 0;       // of the socket
};

// ---- shared by all connections

// Never freed: threads may use it until the process ends.  It has a library context of its own,
// because other code may free or configure the default one.
SSL_CTX* OpenSsl::context() {
  static SSL_CTX* const shared = makeContext();
  return shared;
}

SSL_CTX* OpenSsl::makeContext() {
  OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT | OPENSSL_INIT_NO_LOAD_CONFIG, nullptr);
  OSSL_LIB_CTX* library = OSSL_LIB_CTX_new();
  SSL_CTX* made = library ? SSL_CTX_new_ex(library, nullptr, TLS_method()) : nullptr;
  if (!made || SSL_CTX_set_min_proto_version(made, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(made, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(made, "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256") != 1)
    cannotBegin(textOfLibrary().c_str());
  SSL_CTX_clear_options(made, SSL_OP_ENABLE_MIDDLEBOX_COMPAT);
  SSL_CTX_set_num_tickets(made, 0);  // data connections are one-way
  SSL_CTX_set_session_cache_mode(made, SSL_SESS_CACHE_OFF);
  // A peer that does not use the key is asked for a certificate, and no certificate is accepted.
  SSL_CTX_set_session_id_context(made, identity(), kIdentity.size());
  SSL_CTX_set_verify(made, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_psk_use_session_callback(made, useSession);
  SSL_CTX_set_psk_find_session_callback(made, findSession);
  SSL_CTX_set_default_read_buffer_len(made, 64 << 10);
  return made;
}

BIO_METHOD* OpenSsl::method() {
  static BIO_METHOD* const shared = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "ringreduce");
    if (!made || BIO_meth_set_read(made, readSocket) != 1 ||
        BIO_meth_set_write(made, writeBuffer) != 1 || BIO_meth_set_ctrl(made, control) != 1)
      cannotBegin(textOfLibrary().c_str());
    return made;
  }();
  return shared;
}

// ---- callbacks of OpenSSL

int OpenSsl::readSocket(BIO* bio, char* data, int bytes) {
  OpenSsl& self = of(bio);
  BIO_clear_retry_flags(bio);
  ssize_t n;
  do n = recv(self.socket_, data, static_cast<size_t>(bytes), MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n > 0) {
    self.bytes_read_ += static_cast<uint64_t>(n);
    return static_cast<int>(n);
  }
  if (n == 0) {
    self.ended_ = true;
    return 0;
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK)
    BIO_set_retry_read(bio);
  else
    self.error_ = errno;
  return -1;
}

int OpenSsl::writeBuffer(BIO* bio, const char* data, int bytes) {
  OpenSsl& self = of(bio);
  BIO_clear_retry_flags(bio);
  self.out_.insert(self.out_.end(), data, data + bytes);
  return bytes;
}

long OpenSsl::control(BIO* bio, int what, long, void*) {
  if (what == BIO_CTRL_FLUSH) return 1;  // it is sent later
  if (what == BIO_CTRL_EOF) return of(bio).ended_ ? 1 : 0;
  return 0;
}

// The key in the form of an earlier session, which is how OpenSSL takes pre-shared keys.
SSL_SESSION* OpenSsl::session() const {
  constexpr std::array<unsigned char, 2> kAes128GcmSha256{0x13, 0x01};
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl_, kAes128GcmSha256.data());
  SSL_SESSION* made = SSL_SESSION_new();
  if (cipher && made && SSL_SESSION_set1_master_key(made, key_.data(), key_.size()) == 1 &&
      SSL_SESSION_set_cipher(made, cipher) == 1 &&
      SSL_SESSION_set_protocol_version(made, TLS1_3_VERSION) == 1 &&
      SSL_SESSION_set1_id_context(made, identity(), kIdentity.size()) == 1)
    return made;
  SSL_SESSION_free(made);
  return nullptr;
}

int OpenSsl::useSession(SSL* ssl, const EVP_MD*, const unsigned char** name, size_t* name_bytes,
                        SSL_SESSION** session) {
  *session = static_cast<OpenSsl*>(SSL_get_app_data(ssl))->session();
  *name = identity();
  *name_bytes = kIdentity.size();
  return *session ? 1 : 0;
}

int OpenSsl::findSession(SSL* ssl, const unsigned char* name, size_t name_bytes,
                         SSL_SESSION** session) {
  const std::string_view given(reinterpret_cast<const char*>(name), name_bytes);
  *session = given == kIdentity ? static_cast<OpenSsl*>(SSL_get_app_data(ssl))->session() : nullptr;
  return 1;
}

// ---- the handshake

Tls::State OpenSsl::refuse(const std::string& why, State how) {
  why_ = why;
  return state_ = how;
}

Tls::State OpenSsl::shakeHands() {
  if (state_ != State::kGoesOn) return state_;
  ERR_clear_error();
  const int done = SSL_do_handshake(ssl_);
  const int what = done == 1 ? SSL_ERROR_NONE : SSL_get_error(ssl_, done);
  const std::string reason = textOfLibrary();
  const bool flushed = flush();  // also the alert that refuses a peer
  if (!flushed && error_ == 0 && errno != EAGAIN && errno != EWOULDBLOCK) error_ = errno;
  if (what != SSL_ERROR_NONE && ended_)
    return refuse("it ended the connection before that was encrypted", State::kEnded);
  if (error_ != 0) return refuse(std::string("TLS: ") + std::strerror(error_), State::kEnded);
  if (what == SSL_ERROR_WANT_READ) return state_;
  if (what != SSL_ERROR_NONE)
    return refuse("the connection cannot be encrypted (TLS: " + reason +
                  "): the other end has another key, or bytes were changed on their way");
  if (SSL_session_reused(ssl_) != 1) return refuse("TLS: the other end did not use the key");
  if (!flushed) return state_;
  SSL_set_read_ahead(ssl_, 1);  // not before: data after the handshake must stay in the socket
  return state_ = State::kDone;
}

// ---- sending

// False, with errno, if the kernel has not taken all bytes.
bool OpenSsl::flush() {
  while (flushed_ < out_.size()) {
    const ssize_t n = ::send(socket_, out_.data() + flushed_, out_.size() - flushed_,
                             MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0)
      flushed_ += static_cast<size_t>(n);
    else if (errno != EINTR)
      return false;
  }
  out_.clear();
  flushed_ = 0;
  return true;
}

// Encrypts the next bytes; sets `bytes` to their number.
bool OpenSsl::encrypt(Cursor& from, size_t& bytes) {
  if (of_this_key_ >= bytes_of_a_key_) {
    of_this_key_ = 0;
    if (SSL_key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED) != 1) return false;
  }
  std::array<std::byte, kRecord> small;
  for (bytes = 0; bytes < kAtOnce && !from.atEnd();) {
    const std::byte* data = from.data();
    size_t n = std::min(from.left(), kAtOnce - bytes);
    if (n < kRecord) {
      // A frame header and the bytes after it share a record.
      for (n = 0; n < kRecord && !from.atEnd();) {
        const size_t part = std::min(from.left(), kRecord - n);
        std::memcpy(small.data() + n, from.data(), part);
        n += part;
        from.skip(part);
      }
      data = small.data();
    } else {
      n -= n % kRecord;
      from.skip(n);
    }
    size_t written = 0;
    if (SSL_write_ex(ssl_, data, n, &written) != 1 || written != n) return false;
    bytes += n;
  }
  of_this_key_ += bytes;
  return true;
}

ssize_t OpenSsl::send(const iovec* pieces, size_t count) {
  Cursor from{.piece = pieces, .end = pieces + count};
  ERR_clear_error();
  size_t sent = 0;
  for (;;) {
    if (!flush()) break;
    from.skip(owed_);
    sent += std::exchange(owed_, 0);
    if (from.atEnd()) return static_cast<ssize_t>(sent);
    if (!encrypt(from, owed_)) {
      errno = EIO;
      return -1;
    }
    // encrypt() has advanced `from` by owed_ already.
    if (!flush()) break;
    sent += std::exchange(owed_, 0);
  }
  if (errno != EAGAIN && errno != EWOULDBLOCK) return -1;
  if (sent > 0) return static_cast<ssize_t>(sent);
  return -1;
}

// ---- receiving

ssize_t OpenSsl::receive(const iovec* pieces, size_t count) {
  ERR_clear_error();
  size_t got = 0;
  for (const iovec* piece = pieces; piece != pieces + count; ++piece)
    for (size_t at = 0; at < piece->iov_len;) {
      size_t n = 0;
      if (SSL_read_ex(ssl_, static_cast<std::byte*>(piece->iov_base) + at, piece->iov_len - at,
                      &n) == 1) {
        at += n;
        got += n;
        continue;
      }
      const int what = SSL_get_error(ssl_, 0);
      // Report undecryptable bytes at once: there may be no later call.
      if (error_ == 0 && what != SSL_ERROR_WANT_READ && what != SSL_ERROR_ZERO_RETURN && !ended_) {
        errno = EBADMSG;
        return -1;
      }
      // Return earlier bytes before the error, as the kernel does: they may contain the reason.
      if (got > 0) return static_cast<ssize_t>(got);
      if (error_ != 0) {
        errno = error_;
        return -1;
      }
      if (what != SSL_ERROR_WANT_READ) return 0;
      errno = EAGAIN;
      return -1;
    }
  return static_cast<ssize_t>(got);
}

}  // namespace

bool Tls::isBuiltIn() {
  return true;
}

std::string Tls::version() {
  const std::string text = OpenSSL_version(OPENSSL_VERSION);
  return text.substr(0, text.find(' ', text.find(' ') + 1));
}

std::unique_ptr<Tls> Tls::make(Side side, int socket, const Digest& key, size_t bytes_of_a_key) {
  return std::make_unique<OpenSsl>(side, socket, key, bytes_of_a_key);
}

}  // namespace ringreduce::net

#else

namespace ringreduce::net {

bool Tls::isBuiltIn() {
  return false;
}

std::string Tls::version() {
  return "built without OpenSSL 3";
}

std::unique_ptr<Tls> Tls::make(Side, int, const Digest&, size_t) {
  throw Error(Failure::kSetup, "this build of ringreduce cannot encrypt: " + version());
}

}  // namespace ringreduce::net

#endif
