// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "base/hmac.h"

#include <dlfcn.h>
#include <sys/random.h>

#include <cerrno>
#include <string>

#include "base/errors.h"

namespace cpudist {
namespace {

// As in the headers of OpenSSL, of which 1.1 and 3 have all of them.
struct Libcrypto {
  const void* (*sha256)() = nullptr;  // EVP_sha256
  unsigned char* (*hmac)(const void* hash, const void* key, int key_bytes,
                         const unsigned char* data, size_t size_bytes, unsigned char* mac,
                         unsigned int* mac_bytes) = nullptr;
  int (*compare)(const void* a, const void* b, size_t size_bytes) = nullptr;  // CRYPTO_memcmp
};

constexpr const char* kNames[] = {"libcrypto.so.3", "libcrypto.so.1.1"};

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorCode::kAuthentication,
              "a key is set (CPUDIST_SECRET_FILE or CPUDIST_SECRET), and what would prove it " +
                  why +
                  ". Install OpenSSL's library, 1.1 or newer: the package libssl3 of Debian and "
                  "Ubuntu, openssl-libs of Fedora and RHEL; or unset the key");
}

template <typename Call>
void find(void* library, const char* name, Call* call) {
  *call = reinterpret_cast<Call>(dlsym(library, name));
  if (*call == nullptr) refuse(std::string("lacks ") + name);
}

Libcrypto load() {
  void* library = nullptr;
  std::string why;
  for (const char* name : kNames) {
    // It stays: another part of the process may use it, and threads of it may run.
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library != nullptr) break;
    why += (why.empty() ? "" : "; ") + std::string(dlerror());
  }
  if (library == nullptr) refuse("cannot be opened: " + why);
  Libcrypto found;
  find(library, "EVP_sha256", &found.sha256);
  find(library, "HMAC", &found.hmac);
  find(library, "CRYPTO_memcmp", &found.compare);
  return found;
}

const Libcrypto& libcrypto() {
  static const Libcrypto loaded = load();  // tried again after it threw
  return loaded;
}

}  // namespace

void open_libcrypto() { static_cast<void>(libcrypto()); }

Mac hmac_sha256(std::string_view secret, std::span<const uint8_t> data) {
  const Libcrypto& calls = libcrypto();
  Mac mac{};
  unsigned int mac_bytes = 0;
  const auto* made = calls.hmac(calls.sha256(), secret.data(), static_cast<int>(secret.size()),
                                data.data(), data.size(), mac.data(), &mac_bytes);
  if (made == nullptr || mac_bytes != mac.size()) refuse("does not compute HMAC-SHA256 here");
  return mac;
}

bool equal_macs(const Mac& a, const Mac& b) {
  return libcrypto().compare(a.data(), b.data(), a.size()) == 0;
}

Nonce make_nonce() {
  Nonce nonce{};
  size_t have = 0;
  while (have < nonce.size()) {
    const ssize_t found = getrandom(nonce.data() + have, nonce.size() - have, 0);
    if (found < 0 && errno == EINTR) continue;
    if (found < 0) throw Error(ErrorCode::kInternal, "the kernel gives no random bytes");
    have += static_cast<size_t>(found);
  }
  return nonce;
}

}  // namespace cpudist
