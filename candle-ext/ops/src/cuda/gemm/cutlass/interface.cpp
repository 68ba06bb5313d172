// Functions of a tile's object that describe it. scripts/build-cutlass defines the macros.
#include "call.h"

unsigned candlewick_cutlass_abi() { return CANDLEWICK_CUTLASS_ABI; }

const char* candlewick_cutlass_tile() { return CANDLEWICK_TILE; }

const char* candlewick_cutlass_build() { return CANDLEWICK_BUILD; }
