// Entry points: sums of exponentials over keys (the drawing is in panel.h; docs/kernels.md explains the whole), and normal
// laws of many sequences.
//
//   vectors.h      vectors of the compiler, exponential, transposes, half precision
//   microkernel.h  the one matrix product
//   arguments.h    what a call is given
//   pool.h         threads and memory
//   panel.h        queries in lanes: statistics of a block, merged over blocks
//   forward.h      many queries        few_rows.h  at most four: decoding
//   backward.h     gradients           fisher.h    Cov_p(x) u and its gradient
//   losses.h       losses over many atoms: sums of rows and columns, gradients
//   normals.h      weights normalised, mixtures collapsed, observations eliminated
//
// Each returns the number of irregular results (not finite: the caller computes them in a slower, careful way), or −1 where
// there was no memory.
#include <new>

#include "backward.h"
#include "few_rows.h"
#include "fisher.h"
#include "losses.h"
#include "normals.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
template <class F> int64_t guarded(F&& run) {
  try {
    return run();
  } catch (...) { return -1; }
}
}  // namespace

EXPORT int64_t cumulant_abi_version(void) { return CUMULANT_ABI_VERSION; }
EXPORT int64_t cumulant_call_bytes(void) { return sizeof(Call); }
EXPORT int64_t cumulant_loss_call_bytes(void) { return sizeof(LossCall); }
EXPORT const char* cumulant_instruction_set(void) {
#if defined(__AVX512F__)
  return "x86-64-v4";
#elif defined(__AVX2__)
  return "x86-64-v3";
#elif defined(__aarch64__)
  return "aarch64";
#else
  return "other";
#endif
}
EXPORT int64_t cumulant_forward(const Call* c) {
  return guarded([&] { return c->precision == 4 ? forward<float>(*c) : forward<double>(*c); });
}
EXPORT int64_t cumulant_backward(const Call* c) {
  return guarded([&] { return c->precision == 4 ? Backward<float, PANEL_VECTORS>::run(*c) : Backward<double, PANEL_VECTORS>::run(*c); });
}
EXPORT int64_t cumulant_fisher(const Call* c) {
  return guarded([&] { return c->precision == 4 ? Fisher<float, PANEL_VECTORS>::run(*c) : Fisher<double, PANEL_VECTORS>::run(*c); });
}
EXPORT int64_t cumulant_fisher_backward(const Call* c) {
  return guarded([&] { return c->precision == 4 ? Fisher<float, PANEL_VECTORS>::backward(*c) : Fisher<double, PANEL_VECTORS>::backward(*c); });
}
EXPORT int64_t cumulant_loss_sums(const LossCall* c) { return guarded([&] { return losses(*c, true, false); }); }
EXPORT int64_t cumulant_loss_gradients(const LossCall* c) { return guarded([&] { return losses(*c, false, true); }); }
EXPORT int64_t cumulant_loss_both(const LossCall* c) { return guarded([&] { return losses(*c, true, true); }); }
EXPORT int64_t cumulant_normalize(const Normalization* c) {
  return guarded([&] { return c->precision == 4 ? normalize<float>(*c) : normalize<double>(*c); });
}
EXPORT int64_t cumulant_collapse(const Collapse* c) {
  return guarded([&] { return c->precision == 4 ? collapse<float>(*c) : collapse<double>(*c); });
}
EXPORT int64_t cumulant_eliminate(const Elimination* c) {
  return guarded([&] { return c->precision == 4 ? eliminate<float>(*c) : eliminate<double>(*c); });
}
