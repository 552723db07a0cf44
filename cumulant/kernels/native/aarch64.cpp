// The kernel for aarch64: NEON, vectors of 16 bytes.
#include "kernel.cpp"
