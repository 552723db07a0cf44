// The kernel for x86-64-v4: AVX-512, vectors of 64 bytes.
#include "kernel.cpp"
