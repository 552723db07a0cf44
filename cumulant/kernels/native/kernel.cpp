// What every library of the kernel exports to Python; plain C, loaded by ctypes.
#include <cstdint>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Compared with ABI_VERSION of library.py: raise both when an argument or an entry point changes.
EXPORTED int64_t cumulant_abi_version(void) { return 1; }

EXPORTED const char* cumulant_instruction_set(void) {
#if defined(__AVX512F__)
  return "x86-64-v4";
#elif defined(__AVX2__)
  return "x86-64-v3";
#else
  return "aarch64";
#endif
}
