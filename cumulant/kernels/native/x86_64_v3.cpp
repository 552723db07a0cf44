// The kernel for x86-64-v3: AVX2 and FMA, vectors of 32 bytes.
#include "kernel.cpp"
